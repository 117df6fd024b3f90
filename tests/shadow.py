"""The slow rule for whole parameters: cut into the matrices they stand for, one :class:`Reference` each."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from reference import Reference, factor
from torch import Tensor

from splus import SPlus
from splus.books import is_whitened


class Shadow:
    """A parameter as the slow rule sees it: the matrices that it is cut into, each stepped alone."""

    # Factors start with full rank, and so must the optimizer's.
    def __init__(self, optimizer: SPlus, number: int, position: int) -> None:
        group, books = optimizer.param_groups[number], optimizer._books[number]
        parameter = group["params"][position]
        self.shape, self.maximize = tuple(parameter.shape), group["maximize"]
        self.layout = books.layouts.get(position)
        self.pieces: list[tuple[Any, Reference]] = []
        start = parameter.detach().double()
        options = {
            k: group[k] for k in ("lr", "betas", "eps", "normalization_decay", "ema_decay", "precondition_frequency")
        }
        options |= {k: group[k] for k in ("refresh_growth", "refresh_method")}
        options |= {"spread": group["spread_refreshes"]}
        self.view = self.shape
        if not is_whitened(self.shape, group["stacked"], group["whiten"], group["max_preconditioner_dim"]):
            if parameter.numel():
                width = self.shape[-1] if len(self.shape) > 1 else 1
                scale = group["elementwise_scale"] / width ** group["width_power"]
                options["weight_decay"] = group["weight_decay"] / (1 if group["scale_weight_decay"] else scale)
                self.pieces.append((..., Reference(start, whitened=False, scale=scale, **options)))
            return
        rows, columns = self.shape[-2:] if group["stacked"] else (self.shape[0], math.prod(self.shape[1:]))
        stack = math.prod(self.shape) // (rows * columns)
        self.view = (stack, rows, columns)
        turn = books.refresh_plan(group)[1][position]
        for matrix in range(stack):
            split = group["split"][position] if isinstance(group["split"], list) else None
            for r, c, scale, left, right in cut(rows, columns, split, group):
                s = group["elementwise_scale"] if scale is None else scale
                options["weight_decay"] = group["weight_decay"] / (1 if group["scale_weight_decay"] else s)
                norm = "frobenius" if scale is None else group["step_norm"]
                sides: dict[str, Any] = {"left": left, "right": right, "turn": turn, "scale": s, "step_norm": norm}
                where = (matrix, r[:, None], c)
                reference = Reference(start.view(self.view)[where], **sides, **options)
                reference.L, reference.R = factor(len(r)), factor(len(c))
                self.pieces.append((where, reference))

    def step(self, gradient: Tensor) -> None:
        for where, reference in self.pieces:
            reference.step((-gradient if self.maximize else gradient).reshape(self.view)[where])

    def set_lr(self, lr: float) -> None:
        for _, reference in self.pieces:
            reference.lr = lr

    def whole(self, name: str) -> Tensor:
        """An attribute of the pieces, put together in the parameter's shape."""
        whole = torch.zeros(self.view, dtype=torch.float64)
        for where, reference in self.pieces:
            whole[where] = getattr(reference, name)
        return whole.view(self.shape)

    def matrices(self, name: str) -> Iterator[tuple[str, list[Tensor]]]:
        """An attribute of the pieces in the order of the optimizer's parts, with the suffix of each part's state."""
        assert self.layout is not None
        numbers = torch.zeros(self.view, dtype=torch.long)
        for number, (where, _) in enumerate(self.pieces):
            numbers[where] = number
        for part in range(len(self.layout.parts)):
            order = self.layout.split(numbers.view(self.shape), part)[:, 0, 0].tolist()
            yield f".{part}" if part else "", [getattr(self.pieces[number][1], name) for number in order]

    @property
    def margin(self) -> float:
        return min((reference.margin for _, reference in self.pieces), default=math.inf)


def cut(
    rows: int, columns: int, split: Any, group: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Tensor, Any, bool, bool]]:
    """The pieces of a matrix: rows, columns, scale (None for the elementwise one), and which sides are rotated."""
    limit, C = group["max_preconditioner_dim"], torch.arange(columns)
    for R in torch.arange(rows).split(split or rows):
        m, n = len(R), columns
        scale = {"shape": 2 / (m + n), "fan_in": 1 / n, "none": 1.0}[group["step_scale"]]
        blocks = group["oversized"] == "blocks"
        published = group["oversized"] == "published"
        for r in R.tensor_split(-(-m // limit) if blocks else 1):
            for c in C.tensor_split(-(-n // limit) if blocks else 1):
                left, right = (len(side) <= limit - published for side in (r, c))
                if group["sides"] == "shorter":
                    left, right = left and len(r) <= len(c), right and len(c) < len(r)
                yield r, c, None if published and max(m, n) > limit else scale, left, right
