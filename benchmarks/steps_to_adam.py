"""Steps-to-Adam and time-to-Adam: how soon a run reaches the loss with which Adam ended.

The target is the validation loss of tuned Adam at its last evaluation, with the same seed. A run has reached it at the
first evaluation that is at or below it and whose later evaluations are so too in the mean; between that evaluation and
the one before, the curve counts as straight. Steps are divided by Adam's steps, seconds by Adam's seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run with one set of weights, in the order of their steps."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Crossing:
    """Where a curve reaches its target."""

    step: float
    seconds: float


def crossing(curve: Curve, target: float) -> Crossing | None:
    """The point from which the loss is at or below `target` and stays so in the mean; None if there is none.

    The evaluation before the one found is always above the target: were it at or below, it would itself have
    been found, since the mean after it would be that of losses at or below the target.
    """
    losses = curve.losses
    for i, loss in enumerate(losses):
        after = losses[i + 1 :]
        if not loss <= target or (after and not fmean(after) <= target):  # written so that nan fails
            continue
        if i == 0:
            return Crossing(curve.steps[0], curve.seconds[0])
        before = losses[i - 1]
        part = (before - target) / (before - loss) if math.isfinite(before) else 1.0
        return Crossing(_between(curve.steps, i, part), _between(curve.seconds, i, part))
    return None


def _between(values: Sequence[float], i: int, part: float) -> float:
    """The value `part` of the way from values[i - 1] to values[i]."""
    return values[i - 1] + part * (values[i] - values[i - 1])


def steps_to(curve: Curve, target: float, adam: Curve) -> float | None:
    """Steps until `curve` reaches `target`, over Adam's steps; None if it does not."""
    point = crossing(curve, target)
    return None if point is None else point.step / adam.steps[-1]


def time_to(curve: Curve, target: float, adam: Curve) -> float | None:
    """Training seconds until `curve` reaches `target`, over Adam's seconds; None if it does not."""
    point = crossing(curve, target)
    return None if point is None else point.seconds / adam.seconds[-1]


def seconds_per_step(curves: Sequence[Curve]) -> float:
    """Median over all intervals between evaluations, so that a disturbed interval does not count."""
    rates = [
        (curve.seconds[i] - curve.seconds[i - 1]) / (curve.steps[i] - curve.steps[i - 1])
        for curve in curves
        for i in range(1, len(curve.steps))
    ]
    return median(rates) if rates else math.nan
