"""The averaged weights: an exponential moving average that is right from the first step on."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def averaging_weight(decay: float, step: int) -> float:
    """The weight w of the newest weights in ``average ← average + w (weights - average)``.

    With w = (1 - ρ) / (1 - ρᵗ) the average is the bias-corrected A / (1 - ρᵗ) of arXiv 2506.07254, algorithm 2,
    itself: it equals the weights after step 1, and no later division magnifies its rounding.

    Args:
        decay: ρ, in [0, 1).
        step: t, the number of updates including this one, from 1.
    """
    # -expm1(t log ρ) is 1 - ρᵗ without the cancellation near ρ = 1.
    return 1.0 if decay == 0 else (1 - decay) / -math.expm1(step * math.log(decay))


def update_averages(averages: Sequence[Tensor], weights: Sequence[Tensor], decay: float, steps: Sequence[int]) -> None:
    """In place, move each average towards its weights, which have been updated ``steps[i]`` times (this one included)."""
    for step in sorted(set(steps)):
        chosen = [i for i, taken in enumerate(steps) if taken == step]
        torch._foreach_lerp_([averages[i] for i in chosen], [weights[i] for i in chosen], averaging_weight(decay, step))
