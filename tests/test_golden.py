"""The published settings follow the authors' PyTorch file: its recorded trajectories, see golden/README.md."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Reference
from torch import Tensor, nn

from splus import PAPER, SPlus

GOLDEN = np.load(Path(__file__).parent / "golden" / "reference_trajectories.npz")
CASES = sorted({name.partition("/")[0] for name in GOLDEN.files})


def recorded(case: str, array: str) -> Tensor:
    return torch.from_numpy(np.asarray(GOLDEN[f"{case}/{array}"]))


def settings(case: str) -> dict[str, Any]:
    """The recorded hyperparameters under the names of SPlus."""
    lr, beta1, beta2, rho, period, decay, longest = recorded(case, "hyperparameters").tolist()
    return {
        "lr": lr,
        "betas": (beta1, beta2),
        "ema_decay": rho,
        "precondition_frequency": int(period),
        "weight_decay": decay,
        "max_preconditioner_dim": int(longest),
    }


def replay(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weights and averages of SPlus at the recorded steps."""
    parameter = nn.Parameter(recorded(case, "initial").to(dtype))
    optimizer = SPlus([parameter], **{**PAPER, **settings(case)})
    weights, averages = [], []
    for step, gradient in enumerate(recorded(case, "gradients"), start=1):
        parameter.grad = gradient.to(dtype)
        optimizer.step()
        if step in recorded(case, "steps"):
            weights.append(parameter.detach().to(torch.float64, copy=True))
            with optimizer.averaged():
                averages.append(parameter.detach().to(torch.float64, copy=True))
    return torch.stack(weights), torch.stack(averages)


def test_every_case_was_recorded() -> None:
    """The file holds the cases that its README lists."""
    assert set(CASES) == {
        *("square", "square_decay", "square_default_period", "tiny_gradients"),
        *("one_sided", "vector", "scalar"),
    }


@pytest.mark.parametrize("case", CASES)
def test_published_trajectory_in_double(case: str) -> None:
    """Weights and averages are the authors' to 1e-9 at every recorded step."""
    weights, averages = replay(case, torch.float64)
    torch.testing.assert_close(weights, recorded(case, "weights"), rtol=0, atol=1e-9)
    torch.testing.assert_close(averages, recorded(case, "averages"), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_published_trajectory_in_single(case: str) -> None:
    """In fp32 the same but for rounding, and one rotated entry within rounding of zero taken with the other sign."""
    weights, averages = replay(case, torch.float32)
    initial, hyper = recorded(case, "initial"), settings(case)
    whitened_whole = initial.ndim == 2 and case != "one_sided"
    # A flipped sign moves U by 2 in one rotated entry, which a rotation spreads but does not lengthen.
    scale = 2 / sum(initial.shape) if whitened_whole else PAPER["elementwise_scale"]
    flip = 2 * hyper["lr"] * scale
    for mine, theirs in ((weights, recorded(case, "weights")), (averages, recorded(case, "averages"))):
        distance = (mine - theirs).reshape(len(mine), -1).norm(dim=1)
        rounding = 1e-5 * theirs.norm() / len(theirs) ** 0.5
        assert distance.max() <= flip + rounding


@pytest.mark.parametrize("case", ["square", "square_decay", "one_sided", "vector"])
def test_the_reference_follows_the_authors_too(case: str) -> None:
    """The yardstick of the other tests is right: it meets the same numbers."""
    initial, hyper = recorded(case, "initial"), settings(case)
    longest = hyper.pop("max_preconditioner_dim")
    sides, steps = [side < longest for side in initial.shape], recorded(case, "steps").tolist()
    reference = Reference(
        initial,
        **hyper,
        eps=0.0,
        normalization_decay=0.0,
        refresh_growth=None,
        refresh_method="eigh",
        spread=False,
        step_norm="frobenius",
        whitened=initial.ndim == 2,
        scale=1e-3 if case in ("one_sided", "vector") else None,
        left=sides[0],
        right=sides[-1],
    )
    for step, gradient in enumerate(recorded(case, "gradients"), start=1):
        reference.step(gradient)
        if step in steps:
            at = steps.index(step)
            torch.testing.assert_close(reference.W, recorded(case, "weights")[at], rtol=0, atol=1e-9)
            torch.testing.assert_close(reference.average, recorded(case, "averages")[at], rtol=0, atol=1e-9)
