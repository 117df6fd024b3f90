"""What the optimizer keeps for one parameter group: the plan, the buckets, and the state made of them."""

import math
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splus.arguments import check_parameter, parameter_name, per_parameter
from splus.buckets import Bucket
from splus.faults import Faults
from splus.matrices import MatrixLayout, matrix_layout
from splus.plan import Slot, plan_buckets, refresh_offsets
from splus.precision import LOW_PRECISION, state_dtype

# A run that skips this many batches in a row for a gradient that is not finite is not training any more.
# GradScaler, which halves its scale at each, gets from 2**16 to 2**6 in as many.
GRADIENT_FAULT_LIMIT = 10
# Distributed Shampoo's default for failed decompositions in a row, after which it raises.
DECOMPOSITION_FAULT_LIMIT = 3

State = MutableMapping[Tensor, dict[str, Any]]


class GroupBooks:
    """The plan and the stacked state of group number ``index``. Parameters go by their position in the group.

    Attributes:
        parameters: the group's parameters; one that is listed twice counts once, at its first position.
        names: what messages call them.
        layouts: of the whitened ones.
        elementwise: positions of the others.
        kinds: the dtype and device they had when their state was made.
        gradient_faults, decomposition_faults: by position, and by position and part.
        refreshes, refresh_seconds: matrices refreshed so far, and the time that took.
    """

    def __init__(self, group: Mapping[str, Any], index: int) -> None:
        self._listed = list(group["params"])
        positions = {parameter: position for position, parameter in reversed(list(enumerate(group["params"])))}
        self.parameters: dict[int, Tensor] = {i: p for p, i in sorted(positions.items(), key=lambda item: item[1])}
        self.names = {position: parameter_name(group, index, position) for position in self.parameters}
        for position, parameter in self.parameters.items():
            check_parameter(parameter, self.names[position])
        self.layouts = self._layouts(group)
        self.elementwise = [position for position in self.parameters if position not in self.layouts]
        dtypes = {position: state_dtype(self.parameters[position].dtype) for position in self.layouts}
        devices = {position: self.parameters[position].device for position in self.layouts}
        self.buckets = [Bucket(plan) for plan in plan_buckets(self.layouts, dtypes, devices)]
        self.kinds = {position: (p.dtype, p.device) for position, p in self.parameters.items()}
        self._offsets: tuple[tuple[int, bool], dict[int, int]] | None = None
        self.gradient_faults = Faults(GRADIENT_FAULT_LIMIT)
        self.decomposition_faults = Faults(DECOMPOSITION_FAULT_LIMIT)
        self.refreshes = 0
        self.refresh_seconds = 0.0

    def _layouts(self, group: Mapping[str, Any]) -> dict[int, MatrixLayout]:
        layouts = {}
        for position, parameter in self.parameters.items():
            stacked = per_parameter(group, "stacked")[position]
            if not is_whitened(tuple(parameter.shape), stacked, group["whiten"], group["max_preconditioner_dim"]):
                continue
            try:
                layouts[position] = matrix_layout(
                    parameter.shape,
                    stacked=stacked,
                    split=per_parameter(group, "split")[position],
                    split_dim=per_parameter(group, "split_dim")[position],
                    max_side=group["max_preconditioner_dim"],
                    oversized=group["oversized"],
                )
            except ValueError as error:
                raise ValueError(f"{self.names[position]}: {error}") from None
        return layouts

    def are_of(self, group: Mapping[str, Any], state: State) -> bool:
        """Whether these are the books of the parameters that the group has now, and all of them have their state."""
        same = len(group["params"]) == len(self._listed) and all(map(operator.is_, group["params"], self._listed))
        return same and all(parameter in state for parameter in self._listed)

    def offsets(self, period: int, spread: bool) -> dict[int, int]:
        """How many steps early each whitened parameter refreshes; planned anew when the group's settings change."""
        if self._offsets is None or self._offsets[0] != (period, spread):
            self._offsets = ((period, spread), refresh_offsets(self.layouts, period, spread))
        return self._offsets[1]

    def slots(self) -> Iterator[tuple[Bucket, Slot]]:
        """Every parameter's matrices, bucket by bucket."""
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.plan.slots)

    def link(self, state: State) -> None:
        """Make the state of every parameter, as views into the stacks, with the values that ``state`` has already."""
        for position, fresh in self._initial_state().items():
            parameter = self.parameters[position]
            if parameter in state:
                overwrite(fresh, state[parameter])
            state[parameter] = fresh

    def _initial_state(self) -> dict[int, dict[str, Any]]:
        states: dict[int, dict[str, Any]] = {}
        for position, parameter in self.parameters.items():
            weights = parameter.detach().to(state_dtype(parameter.dtype), copy=True)
            states[position] = {"step": 0, "average": weights}
            if parameter.dtype in LOW_PRECISION:
                states[position]["weights"] = weights.clone()
            if position not in self.layouts:
                states[position]["momentum"] = torch.zeros_like(weights)
        for bucket, slot in self.slots():
            states[slot.parameter].update(bucket.views(slot, self.layouts[slot.parameter]))
        return states


@dataclass(frozen=True)
class Batch:
    """The gradients G (b, m, n) of the slots of a bucket that have one, and their positions ``active`` (b,) in it.

    ``active`` is None when all of the bucket's matrices have a gradient.
    """

    bucket: Bucket
    slots: tuple[Slot, ...]
    active: Tensor | None
    G: Tensor


def stack_gradients(books: GroupBooks, gradients: Mapping[int, Tensor]) -> list[Batch]:
    """Gradients by position in the group, as one batch for each bucket that has any."""
    pieces = {i: books.layouts[i].split(gradient) for i, gradient in gradients.items() if i in books.layouts}
    batches = []
    for bucket in books.buckets:
        slots = tuple(slot for slot in bucket.plan.slots if slot.parameter in pieces)
        if slots:
            active = None
            if slots != bucket.plan.slots:
                matrices = [position for slot in slots for position in slot.matrices]
                active = torch.tensor(matrices, device=bucket.plan.device)
            G = torch.cat([pieces[slot.parameter][slot.part] for slot in slots])
            batches.append(Batch(bucket, slots, active, G))
    return batches


def overwrite(live: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put saved values into a parameter's live state, in place, so that views stay views and nothing is shared."""
    for key, value in saved.items():
        if key not in live:
            live[key] = torch.empty_like(live["average"]).copy_(value)
        elif isinstance(live[key], Tensor):
            live[key].copy_(value)
        else:
            live[key] = int(value)


def is_whitened(shape: Sequence[int], stacked: bool, whiten: bool | str, max_side: int) -> bool:
    """Whether a parameter takes the matrix rule; see ``whiten`` of :class:`~splus.SPlus`."""
    if whiten is False or len(shape) < 2 or math.prod(shape) == 0:
        return False
    if whiten == "2d":
        return len(shape) == 2
    sides = (shape[-2], shape[-1]) if stacked else (shape[0], math.prod(shape[1:]))
    # A single row or column is a vector: its factor has rank one and its basis would be noise.
    return min(sides) > 1 and (whiten is True or max(sides) <= max_side)
