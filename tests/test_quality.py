"""How good samples are: the Fréchet distance, and the command that measures it on runs."""

import pytest
import torch
from scipy.linalg import sqrtm
from torch import Generator, Tensor

from benchmarks.frechet import frechet_distance

D = 5


def drawn(seed: int, examples: int = 40) -> Tensor:
    """Correlated features, not centred."""
    random = Generator().manual_seed(seed)
    mixed = torch.randn(D, D, generator=random, dtype=torch.float64)
    return torch.randn(examples, D, generator=random, dtype=torch.float64) @ mixed + seed


def gaussian(root: Tensor, mean: Tensor, seed: int = 0) -> Tensor:
    """Features whose sample mean and covariance are exactly ``mean`` and rootᵀ · root."""
    white = torch.randn(30, len(root), generator=Generator().manual_seed(seed), dtype=torch.float64)
    white = torch.linalg.qr(white - white.mean(0)).Q * 29**0.5
    return white @ root + mean


def test_distance_of_a_set_to_itself_is_zero() -> None:
    """In any order, and where features do not vary or repeat each other."""
    x = drawn(1)
    x[:, 1], x[:, 2] = 3.0, x[:, 0]
    assert frechet_distance(x, x.flip(0)) == pytest.approx(0, abs=1e-12)


def test_distance_grows_by_the_squared_shift() -> None:
    x, y = drawn(1), drawn(2, 60)
    centred = frechet_distance(x - x.mean(0), y - y.mean(0))
    shift = torch.arange(D, dtype=torch.float64)
    assert frechet_distance(x - x.mean(0) + shift, y - y.mean(0)) == pytest.approx(centred + float(shift @ shift))


def test_distance_is_symmetric() -> None:
    x, y = drawn(1), drawn(2, 60)
    assert frechet_distance(x, y) == pytest.approx(frechet_distance(y, x), rel=1e-12)


def test_distance_is_that_of_gaussians() -> None:
    """Σ (σ - τ)² for independent features; for two dependent ones tr (ST)^(1/2) = (tr ST + 2 |ST|^(1/2))^(1/2)."""
    zero, sigma, tau = torch.zeros(3), torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 2.0, 0.1]).double()
    distance = frechet_distance(gaussian(sigma.diag(), zero), gaussian(tau.diag(), zero, seed=1))
    assert distance == pytest.approx(float((sigma - tau).square().sum()))

    first, second = torch.tensor([[2.0, 1.0], [0.0, 1.0]]).double(), torch.tensor([[1.0, -3.0], [1.0, 0.5]]).double()
    S, T = first.T @ first, second.T @ second
    shared = ((S @ T).trace() + 2 * (S @ T).det().sqrt()).sqrt()
    distance = frechet_distance(gaussian(first, torch.zeros(2)), gaussian(second, torch.zeros(2), seed=1))
    assert distance == pytest.approx(float(S.trace() + T.trace() - 2 * shared))


def test_distance_agrees_with_the_root_of_the_product_of_covariances() -> None:
    """The definition, by scipy."""
    x, y = drawn(1), drawn(2, 60)
    S, T = x.T.cov(), y.T.cov()
    defined = (x.mean(0) - y.mean(0)).square().sum() + (S + T).trace() - 2 * sqrtm((S @ T).numpy()).real.trace()
    assert frechet_distance(x, y) == pytest.approx(float(defined), rel=1e-10)


def test_features_without_a_distance_are_refused() -> None:
    with pytest.raises(ValueError, match="5 examples of 5 features were given"):
        frechet_distance(drawn(1, examples=D), drawn(2))
    with pytest.raises(ValueError, match="both sets need the same"):
        frechet_distance(drawn(1), drawn(2)[:, 1:])
    with pytest.raises(ValueError, match="all finite"):
        frechet_distance(drawn(1), drawn(2) * torch.nan)
