"""The averaged weights: an exponential moving average that is right from the first step on, and its swap."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from splus.precision import LOW_PRECISION, full_precision
from splus.teams import local

State = Mapping[Tensor, dict[str, Any]]


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
    """In place, move each average towards its weights, which have been updated ``steps[i]`` times by now."""
    for step in sorted(set(steps)):
        chosen = [i for i, taken in enumerate(steps) if taken == step]
        torch._foreach_lerp_([averages[i] for i in chosen], [weights[i] for i in chosen], averaging_weight(decay, step))


def put_in_averages(parameters: Iterable[Tensor], state: State) -> None:
    """Put the averages into the model; the weights being trained stay in the state meanwhile.

    The average of a parameter that was never updated is the parameter, whatever has been loaded into it since.
    """
    parameters = list(parameters)
    keep_weights(parameters, state)
    for parameter in parameters:
        of = state[parameter]
        if of["step"] == 0:
            local(of["average"]).copy_(local(of["weights"]))
        local(parameter).copy_(local(of["average"]))


def put_back_weights(parameters: Iterable[Tensor], state: State) -> None:
    """Put the weights being trained back into the model, bit for bit; where none were loaded, it holds them."""
    for parameter in parameters:
        of = state[parameter]
        if "weights" in of:
            local(parameter).copy_(local(of["weights"]))
        elif parameter.dtype in LOW_PRECISION:
            of["weights"] = parameter.detach().to(of["average"].dtype, copy=True)
        if parameter.dtype not in LOW_PRECISION:
            of.pop("weights", None)


def keep_weights(parameters: Iterable[Tensor], state: State) -> None:
    """Keep the weights being trained in the state, which always has them for low-precision parameters."""
    for parameter in parameters:
        if parameter.dtype in LOW_PRECISION:
            full_precision(parameter, state[parameter])
        else:
            state[parameter]["weights"] = parameter.detach().clone()
