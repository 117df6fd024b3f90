"""The search for the best learning rate: a grid of factor 10^(1/3), extended until the best is bracketed.

A rate is bracketed when both its neighbours on the grid were tried and neither is better: worse, or diverged. Losses
are given per grid index: a number, infinity for a diverged run, None for a crashed one, which says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Losses = Mapping[int, float | None]


@dataclass(frozen=True)
class Search:
    """The grid indices to try so far; `finished` when no further one is needed or allowed."""

    indices: tuple[int, ...]
    finished: bool


def rate(index: int) -> float:
    """The learning rate 10^(index/3), to four digits."""
    return float(f"{10 ** (index / 3):.4g}")


def nearest_index(lr: float) -> int:
    """The grid index whose rate is nearest to `lr` (in ratio)."""
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"start learning rate {lr} given; a positive number is required")
    return round(3 * math.log10(lr))


def best(losses: Losses) -> int | None:
    """The index with the lowest finite loss."""
    finite = {index: loss for index, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(finite, key=lambda index: (finite[index], index)) if finite else None


def missing(losses: Losses) -> set[int]:
    """The indices that must still be tried: the untried neighbours of the best; below all if all diverged."""
    index = best(losses)
    if index is None:
        diverged = [index for index, loss in losses.items() if loss is not None]
        return {min(diverged) - 1} - set(losses) if diverged else set()
    return {index - 1, index + 1} - set(losses)


def is_bracketed(losses: Losses) -> bool:
    index = best(losses)
    return index is not None and all(losses.get(index + side) is not None for side in (-1, 1))


def search(start: int, limit: int, losses_at: Callable[[int], tuple[float | None, ...] | None]) -> Search:
    """Which indices to try, given what is known.

    `losses_at(index)`: the losses of the run at that rate, one per row of the table that is chosen from these runs
    (each must be bracketed), or None while it has not ended. The search is replayed from its start and is
    extended only when all it asked for is known: what is tried, and so the table, depends on the losses
    alone, not on the order in which runs happened to end.
    """
    tried = [start, start - 1, start + 1][:limit]
    while True:
        known = {index: losses for index in tried if (losses := losses_at(index)) is not None}
        if len(known) < len(tried):
            return Search(tuple(tried), finished=False)
        rows = len(known[start])
        wanted = set[int]().union(*(missing({i: losses[row] for i, losses in known.items()}) for row in range(rows)))
        extension = sorted(wanted)[: limit - len(tried)]
        if not extension:
            return Search(tuple(tried), finished=True)
        tried += extension
