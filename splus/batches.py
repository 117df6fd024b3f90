"""What is stepped together: batches of neighbouring matrices, and of parameters that are not whitened."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from splus.books import GroupBooks
from splus.buckets import Bucket
from splus.plan import BATCH_LIMIT, Piece
from splus.teams import local


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
