"""What the optimizer keeps for one parameter group: the plan, the buckets, and the state made of them."""

import math
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from splus.arguments import STRUCTURAL, check_parameter, parameter_name, per_parameter
from splus.buckets import Bucket
from splus.faults import Faults
from splus.matrices import MatrixLayout, matrix_layout
from splus.owned import put
from splus.plan import RefreshSchedule, Slot, plan_buckets, refresh_schedule, refresh_turns
from splus.precision import LOW_PRECISION, state_dtype
from splus.sharing import Owners, Sharing
from splus.teams import Teams

# A run that skips this many batches in a row for a gradient that is not finite is not training any more.
# GradScaler, which halves its scale at each, gets from 2**16 to 2**6 in as many.
GRADIENT_FAULT_LIMIT = 10
# Distributed Shampoo's default for failed decompositions in a row, after which it raises.
DECOMPOSITION_FAULT_LIMIT = 3

# Steps of the first round of refreshes that are spread, which are full decompositions, and the fewest of a later one.
# Refreshing all matrices of a Transformer takes up to 7 and 5 times its six products: `python -m benchmarks.step_time`.
FIRST_ROUND = 10
SHORTEST_ROUND = 5

State = MutableMapping[Tensor, dict[str, Any]]


class GroupBooks:
    """The plan and the stacked state of group number ``index``. Parameters go by their position in the group.

    Attributes:
        parameters: the group's parameters; one that is listed twice counts once, at its first position.
        names: what messages call them.
        layouts: of the whitened ones.
        elementwise: positions of the others.
        kinds: the dtype and device they had when their state was made.
        sharing: which ranks share which parameters.
        exchanges: of the buckets, in their order; None for one of this process alone.
        gradient_faults, decomposition_faults: by position, and by position and part.
        refreshes, refresh_seconds: matrices refreshed so far, and the time that took.
    """

    def __init__(self, group: Mapping[str, Any], index: int, teams: Teams, owned: Owners) -> None:
        self._listed = list(group["params"])
        self._decisive = deepcopy(_decisive(group))
        positions = {parameter: position for position, parameter in reversed(list(enumerate(group["params"])))}
        self.parameters: dict[int, Tensor] = {i: p for p, i in sorted(positions.items(), key=lambda item: item[1])}
        self.names = {position: parameter_name(group, index, position) for position in self.parameters}
        for position, parameter in self.parameters.items():
            check_parameter(parameter, self.names[position])
        self.layouts = self._layouts(group)
        self.elementwise = [position for position in self.parameters if position not in self.layouts]
        self.kinds = {position: (p.dtype, p.device) for position, p in self.parameters.items()}
        self._refreshes: tuple[tuple[Any, ...], RefreshSchedule, dict[int, int]] | None = None
        self.sharing = Sharing(
            self.parameters,
            self.names,
            self.layouts,
            self.refresh_plan(group)[1],
            group["precondition_frequency"],
            teams,
            owned,
        )
        plans = plan_buckets(
            self.layouts,
            {position: state_dtype(self.parameters[position].dtype) for position in self.layouts},
            {position: self.parameters[position].device for position in self.layouts},
            self.sharing.team_numbers(),
            self.sharing.owned_here(),
        )
        self._remembers = group["normalization_decay"] > 0
        self.buckets = [
            Bucket(plan, group["matmul_dtype"], group["step_norm"] == "spectral", self._remembers) for plan in plans
        ]
        self.exchanges = [self.sharing.exchange(plan) for plan in plans]
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
                    sides=group["sides"],
                    scale_rule=group["step_scale"],
                )
            except ValueError as error:
                raise ValueError(f"{self.names[position]}: {error}") from None
        return layouts

    def are_of(self, group: Mapping[str, Any], state: State) -> bool:
        """Whether these are the books of the parameters and options the group has now, and all have their state."""
        same = len(group["params"]) == len(self._listed) and all(map(operator.is_, group["params"], self._listed))
        return same and _decisive(group) == self._decisive and all(parameter in state for parameter in self._listed)

    def refresh_plan(self, group: Mapping[str, Any]) -> tuple[RefreshSchedule, dict[int, int]]:
        """The schedule of refreshes and each whitened parameter's turn; made anew when the group's settings change."""
        settings = (group["precondition_frequency"], group["refresh_growth"], group["spread_refreshes"])
        if self._refreshes is None or self._refreshes[0] != settings:
            period, growth, spread = settings
            schedule = refresh_schedule(period, growth, *((FIRST_ROUND, SHORTEST_ROUND) if spread else (1, 1)))
            self._refreshes = (settings, schedule, refresh_turns(self.layouts, period, spread))
        return self._refreshes[1:]

    def needs_order(self, position: int) -> bool:
        """Whether the parameter's entries must lie in order for its matrices to be written to in place."""
        return position in self.layouts and (position in self.sharing.teams or self.layouts[position].divided)

    def slots(self) -> Iterator[tuple[Bucket, Slot]]:
        """Every parameter's matrices, bucket by bucket."""
        return ((bucket, slot) for bucket in self.buckets for slot in bucket.plan.slots)

    def linked_state(self, state: State) -> dict[Tensor, dict[str, Any]]:
        """The state of every parameter, as views into the stacks, with the values that ``state`` has already.

        Raises:
            ValueError: those were made with options that gave them other shapes.
        """
        linked = {}
        for position, fresh in self._initial_state().items():
            parameter = self.parameters[position]
            if state.get(parameter):
                _check_fit(self.names[position], fresh, state[parameter])
                overwrite(fresh, state[parameter])
            linked[parameter] = fresh
        return linked

    def _initial_state(self) -> dict[int, dict[str, Any]]:
        states: dict[int, dict[str, Any]] = {}
        for position, parameter in self.parameters.items():
            weights = parameter.detach().to(state_dtype(parameter.dtype), copy=True)
            if self.needs_order(position):
                weights = weights.contiguous()
            states[position] = {"step": 0, "average": weights}
            if parameter.dtype in LOW_PRECISION:
                states[position]["weights"] = weights.clone()
            if position not in self.layouts:
                states[position]["momentum"] = torch.zeros_like(weights)
                if self._remembers:
                    states[position]["recent_norm"] = torch.zeros_like(weights)
        for bucket, slot in self.slots():
            states[slot.parameter]["peak"] = 0.0
            states[slot.parameter].update(bucket.views(slot, self.layouts[slot.parameter]))
        return states


def overwrite(live: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put saved values into a parameter's live state, in place, so that views stay views and nothing is shared."""
    for key, value in saved.items():
        if key not in live:
            live[key] = torch.empty_like(live["average"])
            put(live[key], value)
        elif isinstance(live[key], Tensor):
            put(live[key], value)
        else:
            live[key] = type(live[key])(value)


def _decisive(group: Mapping[str, Any]) -> list[Any]:
    """What decides the layouts and dtypes of a group's state."""
    return [group[option] for option in (*STRUCTURAL, "matmul_dtype")]


def _check_fit(name: str, fresh: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Raise for state that has other entries or shapes than the options of its group now ask for."""

    def shapes(state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: tuple(value.shape) for key, value in state.items() if isinstance(value, Tensor) and key != "weights"
        }

    now, before = shapes(fresh), shapes(kept)
    for key in (*now, *before):
        if now.get(key) != before.get(key):
            raise ValueError(
                f"{key} of {name} has shape {before.get(key)} in the state, and the options of its group now ask for "
                f"{now.get(key)}. One of {', '.join(STRUCTURAL)} was changed after the state was made: set it back, "
                "or make a new optimizer."
            )


def is_whitened(shape: Sequence[int], stacked: bool, whiten: bool | str, max_side: int) -> bool:
    """Whether a parameter takes the matrix rule; see ``whiten`` of :class:`~splus.SPlus`."""
    if whiten is False or len(shape) < 2 or math.prod(shape) == 0:
        return False
    if whiten == "2d":
        return len(shape) == 2
    sides = (shape[-2], shape[-1]) if stacked else (shape[0], math.prod(shape[1:]))
    # A single row or column is a vector: its factor has rank one and its basis would be noise.
    return min(sides) > 1 and (whiten is True or max(sides) <= max_side)
