"""What a few seeds say: means with bootstrap intervals, and differences between runs of the same seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

LEVEL = 0.95
ALL_RESAMPLES = 6  # values of which every resample is taken, at most 6^6 = 46,656
DRAWS = 20_000  # resamples of more values


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval; ``missing`` of ``total`` values are none (not reached, diverged)."""

    mean: float
    low: float
    high: float
    missing: int
    total: int
    values: tuple[float, ...] = ()

    @property
    def complete(self) -> bool:
        return self.total > 0 and self.missing == 0


def estimate(values: Sequence[float | None]) -> Estimate:
    """The mean of the values there are; the interval is that of means of resamples, from quantile to quantile.

    Up to six values are resampled in every way there is, so that nothing is drawn.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    missing = len(values) - len(known)
    if not known:
        return Estimate(math.nan, math.nan, math.nan, missing, len(values))
    low, high = quantiles(resampled_means(np.array(known)))
    return Estimate(float(np.mean(known)), low, high, missing, len(values), tuple(known))


def mean_over(groups: Sequence[Sequence[float]]) -> Estimate:
    """The mean of the means of groups (objectives), each resampled by itself (seeds)."""
    if not groups or not all(groups):
        return Estimate(math.nan, math.nan, math.nan, sum(not group for group in groups), len(groups))
    generator = np.random.default_rng(0)
    means = [resampled_means(np.array(group)) for group in groups]
    draws = np.mean([generator.choice(of_group, DRAWS) for of_group in means], axis=0)
    low, high = quantiles(draws)
    return Estimate(float(np.mean([np.mean(group) for group in groups])), low, high, 0, len(groups))


def resampled_means(values: np.ndarray) -> np.ndarray:
    if len(values) <= ALL_RESAMPLES:
        chosen = np.array(list(product(range(len(values)), repeat=len(values))))
    else:
        chosen = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    means: np.ndarray = values[chosen].mean(axis=1)
    return means


def quantiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with the 95% interval and two-sided p of Student's paired t-test."""

    mean: float
    low: float
    high: float
    p: float
    pairs: int

    @property
    def significant(self) -> bool:
        return self.p < 1 - LEVEL


def paired_difference(values: Sequence[float | None], others: Sequence[float | None]) -> Difference | None:
    """Of ``values`` less ``others``, pair by pair; None if fewer than two pairs are finite.

    A run that diverged, or is not there, takes its pair with it.
    """
    pairs = [
        (a, b)
        for a, b in zip(values, others)
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    ]
    if len(pairs) < 2:
        return None
    differences = np.array([a - b for a, b in pairs])
    mean, error = float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(pairs)))
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0), len(pairs))
    student = stats.t(len(pairs) - 1)
    width = error * float(student.ppf((1 + LEVEL) / 2))
    return Difference(mean, mean - width, mean + width, 2 * float(student.sf(abs(mean) / error)), len(pairs))
