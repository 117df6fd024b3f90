"""What the optimizer keeps for one parameter group: the plan, the buckets, and the state made of them."""

import math
import operator
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from splus.arguments import STRUCTURAL, check_parameter, parameter_name, per_parameter
from splus.buckets import Bucket
from splus.exchange import Exchange
from splus.faults import Faults
from splus.matrices import MatrixLayout, matrix_layout
from splus.owned import put
from splus.ownership import Matrix, Ownership, own
from splus.plan import BATCH_LIMIT, Piece, RefreshSchedule, Slot, plan_buckets, refresh_schedule, refresh_turns
from splus.precision import LOW_PRECISION, state_dtype
from splus.teams import Team, Teams, local

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
        teams: of the parameters that ranks share.
        exchanges: of the buckets, in their order; None for one of this process alone.
        gradient_faults, decomposition_faults: by position, and by position and part.
        refreshes, refresh_seconds: matrices refreshed so far, and the time that took.
    """

    def __init__(
        self,
        group: Mapping[str, Any],
        index: int,
        teams: Teams,
        owned: Mapping[Tensor, Mapping[Matrix, int]] | None = None,
    ) -> None:
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
        self.teams = self._teams(teams)
        distinct = list(dict.fromkeys(self.teams.values()))
        self.ownerships = [self._own(group, team, owned or {}) for team in distinct]
        plans = plan_buckets(
            self.layouts,
            {position: state_dtype(self.parameters[position].dtype) for position in self.layouts},
            {position: self.parameters[position].device for position in self.layouts},
            {position: distinct.index(team) for position, team in self.teams.items()},
            {key: found for team, of in zip(distinct, self.ownerships) for key, found in of.indices(team.rank).items()},
        )
        self.buckets = [Bucket(plan, group["matmul_dtype"], group["step_norm"] == "spectral") for plan in plans]
        self.exchanges = [
            None
            if plan.team is None
            else Exchange(
                self.ownerships[plan.team].restricted({(slot.parameter, slot.part) for slot in plan.slots}),
                distinct[plan.team].group,
            )
            for plan in plans
        ]
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

    def _teams(self, teams: Teams) -> dict[int, Team]:
        found = {}
        for position, parameter in self.parameters.items():
            team = teams.of(parameter)
            if team is not None:
                team.check(parameter, self.names[position])
                found[position] = team
        return found

    def _own(self, group: Mapping[str, Any], team: Team, owned: Mapping[Tensor, Mapping[Matrix, int]]) -> Ownership:
        """Share the matrices of a team's parameters; those of ``owned`` keep their owners."""
        layouts = {position: layout for position, layout in self.layouts.items() if self.teams.get(position) is team}
        held = {}
        for position, layout in layouts.items():
            try:
                held[position] = team.held(self.parameters[position], layout)
            except ValueError as error:
                raise ValueError(f"{self.names[position]}: {error}") from None
        kept = {
            replace(matrix, parameter=position): owner
            for position in layouts
            for matrix, owner in owned.get(self.parameters[position], {}).items()
        }
        return own(layouts, held, team.loads, group["precondition_frequency"], self.refresh_plan(group)[1], kept)

    def plan_of(self, position: int) -> tuple[Any, ...]:
        """What all ranks that share a parameter must have planned alike."""
        owners = [
            owner for of in self.ownerships for matrix, owner in of.owners.items() if matrix.parameter == position
        ]
        parameter = self.parameters[position]
        return self.names[position], tuple(parameter.shape), parameter.dtype, self.layouts.get(position), owners

    def shared(self) -> dict[Tensor, Team]:
        """The parameters that ranks share, and which."""
        return {self.parameters[position]: team for position, team in self.teams.items()}

    def owners(self) -> dict[Tensor, dict[Matrix, int]]:
        """Who owns the matrices of each shared parameter."""
        found: dict[Tensor, dict[Matrix, int]] = {}
        for ownership in self.ownerships:
            for matrix, owner in ownership.owners.items():
                found.setdefault(self.parameters[matrix.parameter], {})[matrix] = owner
        return found

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

    def is_in_order(self, position: int) -> bool:
        """Whether the parameter's entries must lie in order for its matrices to be written to in place."""
        return position in self.layouts and (position in self.teams or self.layouts[position].divided)

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
            if self.is_in_order(position):
                weights = weights.contiguous()
            states[position] = {"step": 0, "average": weights}
            if parameter.dtype in LOW_PRECISION:
                states[position]["weights"] = weights.clone()
            if position not in self.layouts:
                states[position]["momentum"] = torch.zeros_like(weights)
        for bucket, slot in self.slots():
            states[slot.parameter]["peak"] = 0.0
            states[slot.parameter].update(bucket.views(slot, self.layouts[slot.parameter]))
        return states


@dataclass(frozen=True)
class Batch:
    """Neighbouring matrices (b, m, n) of a bucket, all of them with a gradient."""

    bucket: Bucket
    pieces: tuple[Piece, ...]

    @property
    def run(self) -> slice:
        """Their positions in the bucket."""
        return slice(self.pieces[0].begin, self.pieces[-1].end)

    @property
    def sections(self) -> list[int]:
        """The number of matrices of each piece."""
        return [piece.end - piece.begin for piece in self.pieces]


def matrix_batches(books: GroupBooks, positions: Collection[int]) -> list[Batch]:
    """The matrices of the parameters at these positions in the group, in as few batches as there can be.

    Those of shared buckets are not among them.
    """
    return [
        batch
        for bucket, exchange in zip(books.buckets, books.exchanges)
        if exchange is None
        for batch in bucket_batches(bucket, positions)
    ]


def bucket_batches(bucket: Bucket, positions: Collection[int]) -> list[Batch]:
    """The matrices of a bucket that belong to the parameters at these positions."""
    runs = bucket.plan.runs([slot for slot in bucket.plan.slots if slot.parameter in positions])
    return [Batch(bucket, pieces) for pieces in runs]


def elementwise_batches(books: GroupBooks, positions: Collection[int]) -> list[list[tuple[int, slice | None]]]:
    """The parameters that are not whitened in batches of at most BATCH_LIMIT entries, large ones by slices of rows.

    Those of a batch have rows of one length, so that one step size is theirs.
    """
    batches: list[list[tuple[int, slice | None]]] = []
    room, kind = 0, None
    for position in books.elementwise:
        if position not in positions:
            continue
        parameter = books.parameters[position]
        own = (parameter.dtype, parameter.device, parameter.shape[-1] if parameter.ndim > 1 else None)
        for rows, count in _row_slices(local(parameter)):
            if count > room or own != kind:
                batches.append([])
                room, kind = BATCH_LIMIT, own
            batches[-1].append((position, rows))
            room -= count
    return batches


def _row_slices(parameter: Tensor) -> list[tuple[slice | None, int]]:
    """Slices of rows with at most BATCH_LIMIT entries, and their entries; None for all rows."""
    if parameter.numel() == 0:
        return []
    if parameter.numel() <= BATCH_LIMIT:
        return [(None, parameter.numel())]
    rows, entries = len(parameter), parameter[0].numel()
    step = max(1, BATCH_LIMIT // entries)
    edges = [*range(0, rows, step), rows]
    return [(slice(first, last), entries * (last - first)) for first, last in pairwise(edges)]


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
