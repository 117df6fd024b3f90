"""The Fréchet distance between two sets of features, as if each were drawn from a Gaussian (FID, arXiv 1706.08500).

Shapes: N examples of the one set, M of the other, d features. All in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(x: Tensor, y: Tensor) -> float:
    """|μ_x - μ_y|² + tr(S_x + S_y - 2 (S_x S_y)^(1/2)) of features x (N, d) and y (M, d); squared, as FID is.

    S = RᵀR with R upper triangular is the sample covariance. The eigenvalues of S_x S_y are the squares of the
    singular values of R_x R_yᵀ, so that no product of covariances is formed and none has to be regular.

    Raises:
        ValueError: the features are not finite matrices of one d, or no more examples than features.
    """
    for features in (x, y):
        check(features)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"{x.shape[1]} features and {y.shape[1]} were given; both sets need the same ones")
    (mean_x, R_x), (mean_y, R_y) = moments(x), moments(y)
    shared = torch.linalg.matrix_norm(R_x @ R_y.T, "nuc")  # tr (S_x S_y)^(1/2)
    squared = (mean_x - mean_y).square().sum() + R_x.square().sum() + R_y.square().sum() - 2 * shared
    return max(0.0, float(squared))  # rounding leaves a little less than 0 of equal sets


def moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and factor R (d, d) of the sample covariance RᵀR of features (N, d)."""
    features = features.double()
    mean = features.mean(0)
    return mean, torch.linalg.qr((features - mean) / (len(features) - 1) ** 0.5, mode="r").R


def check(features: Tensor) -> None:
    if features.dim() != 2 or not features.isfinite().all():
        raise ValueError(f"features of shape {tuple(features.shape)} were given; required are (N, d), all finite")
    examples, dimension = features.shape
    if examples <= dimension:
        raise ValueError(
            f"{examples} examples of {dimension} features were given; a covariance needs more examples than features, "
            "and a distance that is not mostly noise many times more: measure more images"
        )
