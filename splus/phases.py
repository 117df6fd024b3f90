"""The phases of a step of a parameter group: directions, weights and averages, factors, refreshes."""

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from splus.averaging import update_averages
from splus.books import Batch, GroupBooks, stack_gradients
from splus.eigenbasis import refresh_due
from splus.plan import Slot
from splus.precision import full_precision

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]


def step_group(group: Group, books: GroupBooks, state: State, gradients: Mapping[int, Tensor]) -> None:
    """Update the parameters of a group that have a gradient, and their factors.

    Args:
        gradients: by position in the group, in the parameter's shape and the state's dtype.
    """
    for position in gradients:
        state[books.parameters[position]]["step"] += 1
    batches = stack_gradients(books, gradients)
    updates = elementwise_updates(group, books, state, gradients) | whitened_updates(group, books, batches)
    apply_updates(group, books, state, updates)
    for batch in batches:
        batch.bucket.accumulate(batch.G, batch.active, group["betas"][1])


def elementwise_updates(
    group: Group, books: GroupBooks, state: State, gradients: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """s · sign(M) of the parameters that are not whitened, by position."""
    positions = [position for position in books.elementwise if position in gradients]
    if not positions:
        return {}
    momenta = [state[books.parameters[position]]["momentum"] for position in positions]
    torch._foreach_lerp_(momenta, [gradients[position] for position in positions], 1 - group["betas"][0])
    updates = list(torch._foreach_sign(momenta))
    torch._foreach_mul_(updates, group["elementwise_scale"])
    return dict(zip(positions, updates))


def whitened_updates(group: Group, books: GroupBooks, batches: list[Batch]) -> dict[int, Tensor]:
    """s · U of the whitened parameters, by position, in their shapes."""
    pieces: dict[int, dict[int, Tensor]] = {}
    for batch in batches:
        U = batch.bucket.direction(batch.G, batch.active, group["betas"][0], group["eps"])
        U.mul_(_scale(batch.bucket.plan.scale, group))
        for slot, piece in zip(batch.slots, U.split([slot.count for slot in batch.slots])):
            pieces.setdefault(slot.parameter, {})[slot.part] = piece
    return {position: books.layouts[position].join([of[i] for i in sorted(of)]) for position, of in pieces.items()}


def apply_updates(group: Group, books: GroupBooks, state: State, updates: Mapping[int, Tensor]) -> None:
    """Weights, averages and decay, in the order of the authors' file."""
    parameters = [books.parameters[position] for position in updates]
    states = [state[parameter] for parameter in parameters]
    weights = [full_precision(parameter, of) for parameter, of in zip(parameters, states)]
    lr = float(group["lr"])
    torch._foreach_add_(weights, list(updates.values()), alpha=-lr)
    update_averages([of["average"] for of in states], weights, group["ema_decay"], [of["step"] for of in states])
    if group["weight_decay"]:
        for position, whole in zip(updates, weights):
            for region, scale in _scaled_regions(books, position, whole):
                region.mul_(1 - lr * _scale(scale, group) * group["weight_decay"])
    for parameter, whole in zip(parameters, weights):
        if whole is not parameter:
            parameter.copy_(whole)


def refresh_bases(group: Group, books: GroupBooks, state: State, stepped: Collection[int]) -> None:
    """Renew the bases that are due now, together for each bucket and method.

    Args:
        stepped: positions of the parameters that this step updated; the others' schedules stand still.

    Raises:
        RuntimeError: a matrix's decompositions failed too often in a row.
    """
    started = time.perf_counter()
    period, growth = group["precondition_frequency"], group["refresh_growth"]
    offsets = books.offsets(period, group["spread_refreshes"])
    for bucket in books.buckets:
        due: dict[Any, list[Slot]] = {}
        for slot in bucket.plan.slots:
            step = state[books.parameters[slot.parameter]]["step"]
            if slot.parameter in stepped and refresh_due(step, period, growth, offsets[slot.parameter]):
                # There is nothing to start a warm iteration from at step 1.
                due.setdefault("eigh" if step == 1 else group["refresh_method"], []).append(slot)
        for method, slots in due.items():
            failed = bucket.refresh([position for slot in slots for position in slot.matrices], method)
            books.refreshes += sum(slot.count for slot in slots)
            _report_failures(books, slots, failed)
    books.refresh_seconds += time.perf_counter() - started


def _report_failures(books: GroupBooks, refreshed: list[Slot], failed: set[int]) -> None:
    for slot in refreshed:
        key = (slot.parameter, slot.part)
        if failed.isdisjoint(slot.matrices):
            books.decomposition_faults.clear(key)
        else:
            books.decomposition_faults.report(
                key,
                books.names[slot.parameter] + (f", part {slot.part}" if slot.part else ""),
                "A decomposition that failed in fp32 and fp64 keeps the old eigenbasis",
                "Its factors are not finite, or the solver is at fault: scale the loss so that squared gradients "
                "are within fp32's range.",
            )


def _scale(scale: float | None, group: Group) -> float:
    return float(group["elementwise_scale"]) if scale is None else scale


def _scaled_regions(books: GroupBooks, position: int, whole: Tensor) -> list[tuple[Tensor, float | None]]:
    layout = books.layouts.get(position)
    return [(whole, None)] if layout is None else layout.scaled_regions(whole)
