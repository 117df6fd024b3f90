"""Which matrices share a bucket, and on which step each refreshes. Made once for a group, from shapes alone.

parameters           parts                    buckets
qkv   (3d, d) ──── 3 of (d, d) ───┬──────── (d, d):   q k v o      every bucket is one batch, a few products
out    (d, d) ──── 1 of (d, d) ───┘                                 a step whatever the number of layers
up    (4d, d) ──── 1 of (4d, d) ─────────── (4d, d):  up
down  (d, 4d) ──── 1 of (d, 4d) ─────────── (d, 4d):  down
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from splus.matrices import MatrixLayout
from splus.ownership import refresh_work

# Entries of a batch: 16 MiB in fp32, which bounds a step's temporaries. A larger matrix is stepped alone. Batches of a
# quarter of that made steps 5 to 10% slower on two cores, larger ones no faster.
BATCH_LIMIT = 2**22


@dataclass(frozen=True)
class Slot:
    """Matrices ``indices`` of part ``part`` of the group's parameter ``parameter``, from ``start`` on in a bucket."""

    parameter: int
    part: int
    start: int
    indices: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.indices)

    @property
    def matrices(self) -> range:
        """Their positions in the bucket."""
        return range(self.start, self.start + self.count)


@dataclass(frozen=True)
class Piece:
    """Matrices ``begin`` to ``end`` (excluded) of a bucket, all of one slot."""

    slot: Slot
    begin: int
    end: int

    @property
    def of_slot(self) -> slice:
        """Their positions among the matrices of the slot."""
        return slice(self.begin - self.slot.start, self.end - self.slot.start)


@dataclass(frozen=True)
class BucketPlan:
    """``size`` matrices of m×n, stepped and refreshed as one batch; ``scale`` as in :class:`~splus.matrices.Part`.

    ``team`` is the number of the team whose ranks share the matrices, those of the slots being this rank's; None if
    they are of this process alone.
    """

    m: int
    n: int
    rotate_left: bool
    rotate_right: bool
    scale: float | None
    dtype: torch.dtype
    device: torch.device
    team: int | None
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return sum(slot.count for slot in self.slots)

    def runs(self, slots: Sequence[Slot]) -> list[tuple[Piece, ...]]:
        """The matrices of these slots, in their order, as runs of neighbours with at most BATCH_LIMIT entries each."""
        longest = max(1, BATCH_LIMIT // (self.m * self.n))
        runs: list[list[Piece]] = []
        for slot in slots:
            begin = slot.start
            while begin < slot.start + slot.count:
                joins = bool(runs) and runs[-1][-1].end == begin and begin - runs[-1][0].begin < longest
                if not joins:
                    runs.append([])
                first = runs[-1][0].begin if runs[-1] else begin
                end = min(slot.start + slot.count, first + longest)
                runs[-1].append(Piece(slot, begin, end))
                begin = end
        return [tuple(run) for run in runs]


def plan_buckets(
    layouts: Mapping[int, MatrixLayout],
    dtypes: Mapping[int, torch.dtype],
    devices: Mapping[int, torch.device],
    teams: Mapping[int, int],
    owned: Mapping[tuple[int, int], Sequence[int]],
) -> list[BucketPlan]:
    """Collect the parts of a group's parameters (by their position in the group) that can be one batch.

    Args:
        layouts, dtypes, devices: of the parameters that are whitened; the dtype is that of their state.
        teams: numbers of the teams that share the work of a parameter, where there is one.
        owned: by parameter and part, the matrices that are this rank's; those that are missing here are all its own.
    """
    buckets: dict[BucketPlan, list[Slot]] = {}
    for parameter, layout in layouts.items():
        for index, part in enumerate(layout.parts):
            kind = BucketPlan(
                m=part.m,
                n=part.n,
                rotate_left=part.rotate_left,
                rotate_right=part.rotate_right,
                scale=part.scale,
                dtype=dtypes[parameter],
                device=devices[parameter],
                team=teams.get(parameter),
                slots=(),
            )
            slots = buckets.setdefault(kind, [])
            start = slots[-1].start + slots[-1].count if slots else 0
            indices = owned.get((parameter, index), range(layout.count(part)))
            slots.append(Slot(parameter, index, start, indices))
    return [replace(kind, slots=tuple(slots)) for kind, slots in buckets.items()]


@dataclass(frozen=True)
class RefreshSchedule:
    """On which steps matrices refresh their bases: once in every round, each at its turn.

    ``ends`` are the last steps of the early rounds; from there on a round takes ``period`` steps.

        step                     1  2  3  4  5  6 | 7  8  9 | 10 11 12 | 13 14 15 16 …       period 6, ends 6, 9, 12
        turn that is due         0  1  2  3  4  5 | 01 23 45 | 01 23 45 | 0  1  2  3
    """

    period: int
    ends: tuple[int, ...]

    def due(self, step: int, turn: int) -> bool:
        """Whether a matrix with this turn, from 0 to period - 1, refreshes after update number ``step`` (from 1)."""
        begin, length = self._round(step)
        return step - begin == 1 + turn * length // self.period

    def is_first(self, step: int) -> bool:
        """Whether a refresh at this step is the matrix's first one, with no basis of its own to start from."""
        return step <= self.ends[0]

    def _round(self, step: int) -> tuple[int, int]:
        """The step before the round that ``step`` is in, and the steps that the round takes."""
        index = bisect_left(self.ends, step)
        if index < len(self.ends):
            begin = self.ends[index - 1] if index else 0
            return begin, self.ends[index] - begin
        steady = self.ends[-1]
        return step - 1 - (step - 1 - steady) % self.period, self.period


def refresh_schedule(period: int, growth: float | None, first: int, shortest: int) -> RefreshSchedule:
    """A first round of ``first`` steps, then rounds that grow from ``shortest`` up to ``period`` steps.

    A factor is an average over its past, so an update changes it by about 1/step early on, and rounds of
    (growth - 1) · step follow that change. Without growth, rounds after the first end at the multiples of ``period``;
    with a ``first`` of 1 that is the schedule of the authors' file.
    """
    ends = [min(first, period)]
    if growth is None:
        ends.append(period)
    else:
        while (length := max(shortest, math.floor((growth - 1) * ends[-1]))) < period:
            ends.append(ends[-1] + length)
    return RefreshSchedule(period, tuple(dict.fromkeys(ends)))


def refresh_turns(layouts: Mapping[int, MatrixLayout], period: int, spread: bool) -> dict[int, int]:
    """The turn of each parameter's matrices, so that no step pays for all of them; the last one if not ``spread``.

    There are as many turns as matrices, evenly over the period, or ``period`` of them. Longest first onto the turn with
    the least work so far; ties go to the earlier parameter, and to turns far from each other. The work of a
    refresh grows with the cubes of the rotated sides.
    """
    if not spread:
        return dict.fromkeys(layouts, period - 1)
    work = {parameter: _refresh_work(layout) for parameter, layout in layouts.items()}
    places = min(period, len(layouts))
    apart = next((k for k in range(round(0.618 * places), places) if math.gcd(k, places) == 1), 1)
    # Neighbours in the heap are a golden section of the period apart, so that what is left over is spread.
    loads = [(0, rank, rank * apart % places * period // places) for rank in range(places)]
    turns: dict[int, int] = {}
    for parameter in sorted(layouts, key=lambda p: (-work[p], p)):
        load, rank, turn = heapq.heappop(loads)
        turns[parameter] = turn
        heapq.heappush(loads, (load + work[parameter], rank, turn))
    return turns


def _refresh_work(layout: MatrixLayout) -> int:
    return sum(layout.count(part) * refresh_work(part) for part in layout.parts)
