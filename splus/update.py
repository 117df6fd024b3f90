"""The rule of SPlus on a batch of B matrices of one shape, as pure functions (arXiv 2506.07254, algorithm 2).

Shapes: gradient G, momentum M and direction U are (B, m, n); the Kronecker factors L (B, m, m) and R (B, n, n); their
eigenbases Q_L (B, m, m) and Q_R (B, n, n), eigenvectors in columns. A side without a basis has None in their place.
"""

from itertools import pairwise

import torch
from torch import Tensor

Scratch = tuple[Tensor, Tensor]

# From this side on, half of G Gᵀ in strips is faster than all of it. On two cores with AVX-512, four strips took 1.0 of
# the whole at 384, 0.7 at 768 and 0.9 at 1536 (fp32); more strips or fewer were no better.
MIRRORED_FROM = 768
STRIPS = 4


def rotate(M: Tensor, Q_L: Tensor | None, Q_R: Tensor | None, scratch: Scratch | None = None) -> Tensor:
    """Q_Lᵀ M Q_R, (B, m, n): the matrices seen in their eigenbases."""
    return _product(None if Q_L is None else Q_L.mT, M, Q_R, scratch)


def rotate_back(X: Tensor, Q_L: Tensor | None, Q_R: Tensor | None, scratch: Scratch | None = None) -> Tensor:
    """Q_L X Q_Rᵀ, (B, m, n): the inverse of :func:`rotate`."""
    return _product(Q_L, X, None if Q_R is None else Q_R.mT, scratch)


def _product(left: Tensor | None, X: Tensor, right: Tensor | None, scratch: Scratch | None) -> Tensor:
    """left X right, in one of two scratch tensors like X, which may be one of them; X itself if both sides are None."""
    first, second = scratch or (torch.empty_like(X), torch.empty_like(X))
    if left is not None:
        X = torch.bmm(left, X, out=second if X is first else first)
    if right is not None:
        X = torch.bmm(X, right, out=second if X is first else first)
    return X


def sign_above_noise(X: Tensor, eps: float) -> Tensor:
    """In place, the sign of every entry of X (B, m, n), 0 where its size is below eps · ‖X‖_F of its own matrix.

    An entry that is zero but for rounding would otherwise take a step as large as any other.
    """
    if eps == 0:
        return X.sign_()
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(X.dtype, torch.float32))
    threshold = (eps * norm).to(X.dtype).clamp_min_(torch.finfo(X.dtype).tiny)
    # Truncated towards zero, whatever is below its threshold is 0; two passes in place and no mask.
    return torch.div(X, threshold, rounding_mode="trunc", out=X).sign_()


def whitened_direction(
    M: Tensor, Q_L: Tensor | None, Q_R: Tensor | None, eps: float, scratch: Scratch | None = None
) -> Tensor:
    """U = Q_L sign(Q_Lᵀ M Q_R) Q_Rᵀ, (B, m, n): instantaneous normalization in a historical basis.

    U depends neither on the signs nor on the order of the eigenvectors, and ‖U‖_F = √(mn) when no rotated entry
    counts as zero (section 4 of the paper). The bases' dtype is that of the products and of U.

    Args:
        scratch: two tensors like U to compute in; U is one of them. None makes them.
    """
    basis = Q_R if Q_L is None else Q_L
    dtype = M.dtype if basis is None else basis.dtype
    scratch = scratch or (torch.empty_like(M, dtype=dtype), torch.empty_like(M, dtype=dtype))
    X = rotate(M if M.dtype == dtype else scratch[0].copy_(M), Q_L, Q_R, scratch)
    X = scratch[0].copy_(M) if X is M else X
    return rotate_back(sign_above_noise(X, eps), Q_L, Q_R, scratch)


def accumulate_factors(G: Tensor, L: Tensor | None, R: Tensor | None, beta2: float) -> None:
    """In place, L ← β2 L + (1-β2) G Gᵀ and R ← β2 R + (1-β2) Gᵀ G, with G (B, m, n)."""
    if L is not None:
        _accumulate(G, L, beta2)
    if R is not None:
        _accumulate(G.mT, R, beta2)


def _accumulate(G: Tensor, L: Tensor, beta2: float) -> None:
    """In place, L ← β2 L + (1-β2) G Gᵀ. Of a long side only the lower half is computed, in strips, and mirrored."""
    side = L.shape[-1]
    if side < MIRRORED_FROM:
        L.baddbmm_(G, G.mT, beta=beta2, alpha=1 - beta2)
        return
    edges = [side * i // STRIPS for i in range(STRIPS + 1)]
    for begin, end in pairwise(edges):
        strip = L[:, begin:end, :end]
        strip.baddbmm_(G[:, begin:end], G[:, :end].mT, beta=beta2, alpha=1 - beta2)
        L[:, :begin, begin:end].copy_(strip[..., :begin].mT)
