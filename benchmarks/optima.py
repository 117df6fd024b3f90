"""The best learning rate of a width from runs on a grid, and how it moves as the width doubles.

Learning rates are counted in half octaves: index i is 2^(i/2). Losses are as in :mod:`benchmarks.bracket`: a number,
infinity for a diverged run, None for a crashed one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.bracket import Losses, best

PER_OCTAVE = 2
# Points this many half octaves from the best one take part in the fit: within an octave the curves are parabolas.
FITTED = 2
CONFIDENCE = 0.95


def rate(index: int) -> float:
    """The learning rate 2^(index/2), to four digits."""
    return float(f"{2 ** (index / PER_OCTAVE):.4g}")


def nearest_index(lr: float) -> int:
    """The grid index whose rate is nearest to ``lr`` (in ratio)."""
    if not (lr > 0 and math.isfinite(lr)):
        raise ValueError(f"start learning rate {lr} given; a positive number is required")
    return round(PER_OCTAVE * math.log2(lr))


def search(start: int, limit: int, loss_at: Callable[[int], float | None]) -> tuple[list[int], bool]:
    """Indices to try with the first seed, and whether the search is over.

    Octaves are tried until the best is bracketed, then the half octaves beside it, until it has two neighbours on
    either side or ``limit`` rates are tried. The order depends on the losses alone.

    Args:
        loss_at: the loss at an index; raises KeyError while it is not known.
    """

    def extension(losses: Losses) -> list[int]:
        centre = best(losses)
        if centre is None:  # all diverged, or crashed
            return [min(losses) - 4] if any(loss is not None for loss in losses.values()) else []
        octaves = [index for index in (centre - 2, centre + 2) if index not in losses]
        return octaves or [index for index in (centre - 1, centre + 1) if index not in losses]

    return _extended([start, start - 2, start + 2], limit, loss_at, extension)


def further_indices(centre: int, limit: int, loss_at: Callable[[int], float | None]) -> tuple[list[int], bool]:
    """As :func:`search`, with a further seed: around ``centre``, until the seed's best has neighbours."""

    def extension(losses: Losses) -> list[int]:
        own = best(losses)
        return [] if own is None else [index for index in (own - 1, own + 1) if index not in losses]

    return _extended([centre, centre - 1, centre + 1], limit, loss_at, extension)


def _extended(
    first: list[int],
    limit: int,
    loss_at: Callable[[int], float | None],
    extension: Callable[[Losses], list[int]],
) -> tuple[list[int], bool]:
    """The indices that ``extension`` asks for from ``first`` on, as far as losses are known; whether it is over."""
    tried = first[:limit]
    while True:
        try:
            losses = {index: loss_at(index) for index in tried}
        except KeyError:
            return tried, False
        wanted = extension(losses)[: limit - len(tried)]
        if not wanted:
            return tried, True
        tried += wanted


@dataclass(frozen=True)
class Optimum:
    """The best learning rate of a width, in octaves (log2), one number a seed.

    ``bracketed``: every seed has worse losses on both sides of its best.
    """

    by_seed: tuple[float, ...]
    bracketed: bool

    @property
    def octaves(self) -> float:
        return fmean(self.by_seed)

    @property
    def index(self) -> int:
        """The grid index that is nearest."""
        return round(self.octaves * PER_OCTAVE)

    @property
    def low(self) -> float:
        return min(self.by_seed)

    @property
    def high(self) -> float:
        return max(self.by_seed)


def optimum(seeds: Sequence[Losses]) -> Optimum | None:
    """The minimum of a parabola through each seed's losses, of one curvature for all seeds; None without a loss.

    A seed whose parabola has no minimum, or one beyond the rates it tried, counts with its best rate.
    """
    finite = [{i: x for i, x in losses.items() if x is not None and math.isfinite(x)} for losses in seeds]
    if not finite or not all(finite):
        return None
    centres = [min(losses, key=lambda i: (losses[i], i)) for losses in finite]
    near = [
        {i: loss for i, loss in losses.items() if abs(i - centre) <= FITTED} for losses, centre in zip(finite, centres)
    ]
    curvature, slopes = _fit(near)
    found = []
    for losses, centre, slope in zip(finite, centres, slopes):
        vertex = -slope / (2 * curvature) if curvature > 0 else centre
        inside = min(losses) <= vertex <= max(losses)
        found.append((vertex if inside else centre) / PER_OCTAVE)
    bracketed = all(
        all(losses.get(centre + side) is not None for side in (-1, 1)) for losses, centre in zip(seeds, centres)
    )
    return Optimum(tuple(found), bracketed)


def _fit(seeds: Sequence[Mapping[int, float]]) -> tuple[float, list[float]]:
    """Least squares for loss = a i² + b i + c with a of all seeds, b and c of each: a and the b's."""
    rows, values, count = [], [], len(seeds)
    for seed, losses in enumerate(seeds):
        for index, loss in losses.items():
            row = [0.0] * (1 + 2 * count)
            row[0], row[1 + seed], row[1 + count + seed] = index**2, index, 1.0
            rows.append(row)
            values.append(loss)
    solution = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    return float(solution[0]), [float(b) for b in solution[1 : 1 + count]]


@dataclass(frozen=True)
class Slope:
    """Octaves per doubling of the width, with a 95% confidence interval."""

    value: float
    low: float
    high: float


def drift(optima: Mapping[int, Optimum]) -> Slope | None:
    """The least-squares slope of log2(best rate) on log2(width) over all widths and seeds; None for a single width."""
    points = [(math.log2(width), octaves) for width, best in optima.items() for octaves in best.by_seed]
    if len({x for x, _ in points}) < 2:
        return None
    line = stats.linregress(*zip(*points))
    freedom = len(points) - 2
    error = 0.0 if math.isnan(line.stderr) else line.stderr  # undefined for equal optima
    margin = error * stats.t.ppf((1 + CONFIDENCE) / 2, freedom) if freedom else math.inf
    return Slope(float(line.slope), float(line.slope - margin), float(line.slope + margin))
