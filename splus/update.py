"""The rule of SPlus on a batch of B matrices of one shape, as pure functions (arXiv 2506.07254, algorithm 2).

Shapes: gradient G, momentum M and direction U are (B, m, n); the Kronecker factors L (B, m, m) and R (B, n, n); their
eigenbases Q_L (B, m, m) and Q_R (B, n, n), eigenvectors in columns. A side without a basis has None in their place.
"""

import torch
from torch import Tensor


def rotate(M: Tensor, Q_L: Tensor | None, Q_R: Tensor | None) -> Tensor:
    """Q_Lᵀ M Q_R, (B, m, n): the matrices seen in their eigenbases."""
    if Q_L is not None:
        M = Q_L.mT @ M
    return M if Q_R is None else M @ Q_R


def rotate_back(X: Tensor, Q_L: Tensor | None, Q_R: Tensor | None) -> Tensor:
    """Q_L X Q_Rᵀ, (B, m, n): the inverse of :func:`rotate`."""
    if Q_L is not None:
        X = Q_L @ X
    return X if Q_R is None else X @ Q_R.mT


def sign_above_noise(X: Tensor, eps: float) -> Tensor:
    """The sign of every entry of X (B, m, n), 0 where its size is below eps · ‖X‖_F of its own matrix.

    An entry that is zero but for rounding would otherwise take a step as large as any other.
    """
    if eps == 0:
        return X.sign()
    threshold = eps * torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    # Truncated towards zero, whatever is below its threshold is 0; three passes in place and no mask.
    return X.div(threshold.clamp_min_(torch.finfo(X.dtype).tiny)).trunc_().sign_()


def whitened_direction(M: Tensor, Q_L: Tensor | None, Q_R: Tensor | None, eps: float) -> Tensor:
    """U = Q_L sign(Q_Lᵀ M Q_R) Q_Rᵀ, (B, m, n): instantaneous normalization in a historical basis.

    U depends neither on the signs nor on the order of the eigenvectors, and ‖U‖_F = √(mn) when no rotated entry
    counts as zero (section 4 of the paper).
    """
    return rotate_back(sign_above_noise(rotate(M, Q_L, Q_R), eps), Q_L, Q_R)


def accumulate_factors(G: Tensor, L: Tensor | None, R: Tensor | None, beta2: float) -> None:
    """In place, L ← β2 L + (1-β2) G Gᵀ and R ← β2 R + (1-β2) Gᵀ G, with G (B, m, n)."""
    if L is not None:
        L.baddbmm_(G, G.mT, beta=beta2, alpha=1 - beta2)
    if R is not None:
        R.baddbmm_(G.mT, G, beta=beta2, alpha=1 - beta2)
