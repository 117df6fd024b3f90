"""What a group's updates and bases look like, computed when asked for."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from splus.books import GroupBooks
from splus.eigenbasis import basis_drift, orthogonality_error
from splus.precision import exact_arithmetic
from splus.scaling import elementwise_step
from splus.teams import local
from splus.update import mean_scale, shrink, soft_sign


@torch.no_grad()
def group_metrics(
    group: Mapping[str, Any], books: GroupBooks, state: Mapping[Tensor, dict[str, Any]]
) -> dict[str, Any]:
    """The metrics of one group; see :meth:`splus.SPlus.metrics`."""
    lr, constant, power = float(group["lr"]), group["elementwise_scale"], group["width_power"]
    squares, entries = 0.0, 0
    drifts, errors = [torch.zeros(1)], [torch.zeros(1)]
    for position in books.elementwise:
        parameter = books.parameters[position]
        U = _elementwise_direction(state[parameter], group["normalization_decay"])
        squares += float(U.square().sum()) * (lr * elementwise_step(parameter.shape, constant, power)) ** 2
        entries += U.numel()
    with exact_arithmetic({bucket.plan.device.type for bucket in books.buckets}):
        for bucket in books.buckets:
            stacks, scale = bucket.stacks, bucket.plan.scale
            U = bucket.preview(group["eps"], group["normalization_decay"])
            squares += float(U.square().sum()) * (lr * (constant if scale is None else scale)) ** 2
            entries += U.numel()
            for side in ("left", "right"):
                if f"basis_{side}" in stacks:
                    Q = stacks[f"basis_{side}"].to(bucket.plan.dtype)
                    drifts.append(basis_drift(stacks[f"factor_{side}"], Q).cpu())
                    errors.append(orthogonality_error(Q).cpu())
    metrics = {"name": group["name"]} if "name" in group else {}
    return metrics | {
        "update_rms": math.sqrt(squares / max(entries, 1)),
        "basis_drift": float(torch.cat(drifts).max()),
        "orthogonality_error": float(torch.cat(errors).max()),
        "refreshes": books.refreshes,
        "refresh_seconds": books.refresh_seconds,
    }


def _elementwise_direction(state: Mapping[str, Any], decay: float) -> Tensor:
    """U of a parameter that is not whitened, in its shape, if its momentum stayed as it is."""
    M = local(state["momentum"]).clone()
    if not decay:
        return M.sign_()
    shrink(M, torch.finfo(M.dtype).tiny, torch.empty_like(M))
    U = soft_sign(M, local(state["recent_norm"]).clone(), decay)
    return U.mul_(mean_scale(decay, state["step"] + 1))
