"""Who computes which matrix, and which entries travel for it: arithmetic alone, the same on every rank.

Every matrix has one owner, which keeps its momentum, factors and bases and computes its update. What a rank holds of a
parameter, and what a matrix covers of it, are boxes in the parameter seen as (stack, rows, columns):

    weight (4, 6) as two blocks a b,      gradients travel to the owners      updates travel back
    sharded by rows over two ranks
                ┌───────┬───────┐
        rank 0  │ a0    │ b0    │          a0 → rank 0   b0 → rank 1         a: rank 0 sends a1 to rank 1
                ├───────┼───────┤
        rank 1  │ a1    │ b1    │          a1 → rank 0   b1 → rank 1         b: rank 1 sends b0 to rank 0
                └───────┴───────┘
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from splus.matrices import MatrixLayout, Part

# Refreshing the bases of a square matrix once takes about five times its six products, by whichever solver:
# `python -m benchmarks.refresh`. Six products are 6 m³ multiplications, both bases 2 · 15 m³.
REFRESH_WORK = 15


@dataclass(frozen=True)
class Box:
    """Entries from ``start`` to ``stop`` (excluded) of a parameter seen as (stack, rows, columns)."""

    start: tuple[int, int, int]
    stop: tuple[int, int, int]

    @property
    def sizes(self) -> tuple[int, int, int]:
        a, b, c = (stop - start for start, stop in zip(self.start, self.stop))
        return a, b, c

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def __and__(self, other: "Box") -> "Box | None":
        """What both cover; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(int.__lt__, start, stop)) else None  # type: ignore[arg-type]

    def within(self, other: "Box") -> tuple[slice, slice, slice]:
        """Where this box lies in a tensor that holds ``other``."""
        a, b, c = (slice(i - o, j - o) for i, j, o in zip(self.start, self.stop, other.start))
        return a, b, c


def matrix_box(layout: MatrixLayout, part: Part, index: int) -> Box:
    """What matrix ``index`` of a part covers of its parameter."""
    across = part.columns.count
    stack, place = divmod(index, part.rows.count * across)
    row, column = divmod(place, across)
    top, left = part.rows.start + row * part.m, part.columns.start + column * part.n
    return Box((stack, top, left), (stack + 1, top + part.m, left + part.n))


def matrix_work(part: Part, period: int) -> int:
    """Multiplications for one matrix of a part, over a whole period between refreshes."""
    m, n = part.m, part.n
    sides = part.rotate_left * m + part.rotate_right * n
    return period * (3 * m * n * sides + m * n) + refresh_work(part)


def refresh_work(part: Part) -> int:
    """Multiplications for one refresh of the bases of a matrix of a part."""
    return REFRESH_WORK * (part.rotate_left * part.m**3 + part.rotate_right * part.n**3)


class Loads:
    """What each of ``ranks`` ranks has been given to compute: in all, and in refreshes at each turn."""

    def __init__(self, ranks: int) -> None:
        self.total = [0] * ranks
        self.at_turn: dict[int, list[int]] = {}

    def give(self, rank: int, work: int, turn: int, refresh: int) -> None:
        """Have a rank do ``work`` over a period, ``refresh`` of it at ``turn``."""
        self.total[rank] += work
        self.at_turn.setdefault(turn, [0] * len(self.total))[rank] += refresh

    def least(self, turn: int) -> int:
        """The rank with the least work; of these the one with the least at this turn; of these the first."""
        at_turn = self.at_turn.get(turn, [0] * len(self.total))
        return min(range(len(self.total)), key=lambda rank: (self.total[rank], at_turn[rank]))


@dataclass(frozen=True, order=True)
class Matrix:
    """Matrix ``index`` of part ``part`` of the group's parameter ``parameter``."""

    parameter: int
    part: int
    index: int


@dataclass(frozen=True)
class Message:
    """Entries of a matrix that go from one rank to another, or stay where they are."""

    matrix: Matrix
    box: Box
    source: int
    target: int


class Route:
    """What one rank sends to and receives from each rank, itself too, in the order in which both sides pack it.

    Attributes:
        send_sizes, receive_sizes: entries that leave to, and come from, each of the other ranks.
    """

    def __init__(self, rank: int, ranks: int, messages: Iterable[Message]) -> None:
        self.rank = rank
        self.sent: list[list[Message]] = [[] for _ in range(ranks)]
        self.received: list[list[Message]] = [[] for _ in range(ranks)]
        for message in messages:
            if message.source == rank:
                self.sent[message.target].append(message)
            if message.target == rank:
                self.received[message.source].append(message)
        self.send_sizes = self._sizes(self.sent)
        self.receive_sizes = self._sizes(self.received)

    def _sizes(self, by_rank: list[list[Message]]) -> list[int]:
        entries = [sum(message.box.numel for message in messages) for messages in by_rank]
        entries[self.rank] = 0
        return entries


@dataclass(frozen=True)
class Ownership:
    """The owners of a group's matrices among ``ranks`` ranks, and what each rank holds of each parameter.

    ``held``: by parameter, the box of each rank; None where it holds nothing.
    """

    ranks: int
    layouts: Mapping[int, MatrixLayout]
    owners: Mapping[Matrix, int]
    held: Mapping[int, Sequence[Box | None]]
    _holders: dict[tuple[int, ...], list[tuple[int, Box]]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def replicated(self) -> bool:
        """Whether all ranks hold the same of every parameter: its gradients have nowhere to go."""
        return all(box == boxes[0] for boxes in self.held.values() for box in boxes)

    def of(self, rank: int) -> list[Matrix]:
        """The matrices that a rank owns, in the order of the parameters."""
        return [matrix for matrix, owner in self.owners.items() if owner == rank]

    def indices(self, rank: int) -> dict[tuple[int, int], list[int]]:
        """By parameter and part, which matrices a rank owns."""
        found: dict[tuple[int, int], list[int]] = {}
        for matrix, owner in self.owners.items():
            found.setdefault((matrix.parameter, matrix.part), []).extend([matrix.index] if owner == rank else [])
        return found

    def box(self, matrix: Matrix) -> Box:
        layout = self.layouts[matrix.parameter]
        return matrix_box(layout, layout.parts[matrix.part], matrix.index)

    def shared(self, matrix: Matrix, rank: int) -> Box | None:
        """What a rank holds of a matrix."""
        held = self.held[matrix.parameter][rank]
        return None if held is None else held & self.box(matrix)

    def holders(self, matrix: Matrix) -> list[tuple[int, Box]]:
        """Which ranks hold which entries of a matrix."""
        layout, held = self.layouts[matrix.parameter], self.held[matrix.parameter]
        key = (id(layout), id(held), matrix.part, matrix.index)  # those of equal layers may be the same objects
        if key not in self._holders:
            shares = ((rank, self.shared(matrix, rank)) for rank in range(self.ranks))
            self._holders[key] = [(rank, box) for rank, box in shares if box is not None]
        return self._holders[key]

    def gradient_messages(self, matrix: Matrix) -> list[Message]:
        """A matrix's gradient on its way to the owner: each entry once, from the owner itself if that holds it."""
        owner = self.owners[matrix]
        found: dict[Box, int] = {}
        for rank, box in sorted(self.holders(matrix), key=lambda share: share[0] != owner):
            found.setdefault(box, rank)
        return [Message(matrix, box, rank, owner) for box, rank in found.items()]

    def update_messages(self, matrix: Matrix) -> list[Message]:
        """A matrix's update on its way from the owner to all that hold entries of it."""
        return [Message(matrix, box, self.owners[matrix], rank) for rank, box in self.holders(matrix)]

    def messages_of(self, rank: int) -> tuple[list[Message], list[Message]]:
        """The gradients and the updates that a rank sends or receives in a step of all parameters."""
        gradients, updates = (
            [message for matrix in self.owners for message in of(matrix) if rank in (message.source, message.target)]
            for of in (self.gradient_messages, self.update_messages)
        )
        return gradients, updates

    def traffic(self) -> tuple[list[int], list[int]]:
        """Entries that each rank sends to and receives from others in a step of all parameters."""
        sent, received = [0] * self.ranks, [0] * self.ranks
        for matrix in self.owners:
            for message in (*self.gradient_messages(matrix), *self.update_messages(matrix)):
                if message.source != message.target:
                    sent[message.source] += message.box.numel
                    received[message.target] += message.box.numel
        return sent, received

    def restricted(self, matrices: Collection[tuple[int, int]]) -> "Ownership":
        """The ownership of the matrices of these (parameter, part) alone."""
        owners = {matrix: owner for matrix, owner in self.owners.items() if (matrix.parameter, matrix.part) in matrices}
        return replace(self, owners=owners)


def own(
    layouts: Mapping[int, MatrixLayout],
    held: Mapping[int, Sequence[Box | None]],
    loads: Loads,
    period: int,
    turns: Mapping[int, int],
    kept: Mapping[Matrix, int] | None = None,
) -> Ownership:
    """Share the matrices of a group's whitened parameters among the ranks: longest first onto the least loaded.

    Args:
        held: by parameter, what each rank holds of it.
        loads: of the ranks so far, which grow by these matrices.
        period, turns: as in :class:`~splus.plan.RefreshSchedule`.
        kept: matrices that have an owner already.
    """
    matrices = [
        Matrix(parameter, part, index)
        for parameter, layout in layouts.items()
        for part, of in enumerate(layout.parts)
        for index in range(layout.count(of))
    ]
    owners = dict.fromkeys(matrices, 0)
    kept = {} if kept is None else kept
    parts = {matrix: layouts[matrix.parameter].parts[matrix.part] for matrix in matrices}
    work = {matrix: matrix_work(part, period) for matrix, part in parts.items()}
    for matrix in sorted(matrices, key=lambda matrix: (matrix not in kept, -work[matrix], matrix)):
        turn = turns[matrix.parameter]
        owners[matrix] = kept[matrix] if matrix in kept else loads.least(turn)
        loads.give(owners[matrix], work[matrix], turn, refresh_work(parts[matrix]))
    return Ownership(len(loads.total), layouts, owners, held)


def whole(layout: MatrixLayout) -> Box:
    """All of a parameter, which is what every rank holds of a replicated one."""
    return Box((0, 0, 0), (layout.stack, layout.rows, layout.columns))


def held_box(layout: MatrixLayout, offset: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """A rank's part of a parameter, from ``offset`` on in the parameter's own dimensions; None if it is empty.

    Raises:
        ValueError: the part is no box of (stack, rows, columns).
    """
    if math.prod(sizes) == 0:
        return None
    bounds = []
    for first, last in _merged(layout):
        bounds.append(_range(layout.shape[first:last], offset[first:last], sizes[first:last]))
    start, stop = zip(*bounds)
    return Box(start, stop)


def _merged(layout: MatrixLayout) -> list[tuple[int, int]]:
    """The dimensions of the parameter that make up its stack, its rows and its columns."""
    dims = len(layout.shape)
    stacked = dims > 2 and layout.rows == layout.shape[-2] and layout.columns == layout.shape[-1]
    return [(0, dims - 2), (dims - 2, dims - 1), (dims - 1, dims)] if stacked else [(0, 0), (0, 1), (1, dims)]


def _range(shape: Sequence[int], offset: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Merged dimensions: the entries that a part takes up, if they are neighbours."""
    start, count = 0, 1
    whole_from_here = True
    for length, first, size in zip(shape, offset, sizes):
        if count > 1 and size != length:
            whole_from_here = False
        start, count = start * length + first, count * size
    if not whole_from_here:
        raise ValueError(
            f"A part of sizes {tuple(sizes)} at {tuple(offset)} of dimensions {tuple(shape)} is not in one piece along "
            "a side of its matrices; shard the first of these dimensions only."
        )
    return start, start + count
