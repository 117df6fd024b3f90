"""The rule of SPlus on a batch of B matrices of one shape, as pure functions (arXiv 2506.07254, algorithm 2).

Shapes: gradient G, momentum M and direction U are (B, m, n); the Kronecker factors L (B, m, m) and R (B, n, n); their
eigenbases Q_L (B, m, m) and Q_R (B, n, n), eigenvectors in columns. A side without a basis has None in their place.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

Scratch = tuple[Tensor, Tensor]

# From this side on, half of G Gᵀ in strips is faster than all of it. On two cores with AVX-512, four strips took 1.0 of
# the whole at 384, 0.7 at 768 and 0.9 at 1536 (fp32); more strips or fewer were no better.
MIRRORED_FROM = 768
STRIPS = 4

# The stable rank ‖U‖²_F / ‖U‖²_2 of a direction whose length the spectral normalization leaves as it is. Directions
# had 1 to 27 within 100 steps, growing with the steps and with the width: python -m benchmarks.update_spectrum. What
# is chosen here only sets the scale of learning rates.
STABLE_RANK = 16


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


def noise_level(X: Tensor, eps: float) -> Tensor | None:
    """Below which an entry counts as zero: eps · ‖X‖_F of each matrix, (B, 1, 1) for X (B, m, n); None for eps = 0.

    An entry that is zero but for rounding would otherwise take a step as large as any other.
    """
    if eps == 0:
        return None
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(X.dtype, torch.float32))
    return (eps * norm).to(X.dtype).clamp_min_(torch.finfo(X.dtype).tiny)


def sign_from(X: Tensor, least: Tensor | float | None) -> Tensor:
    """In place, the sign of every entry of X, 0 where its size is below ``least``, a normal number or several."""
    if least is None:
        return X.sign_()
    # Truncated towards zero, whatever is below its threshold is 0; two passes in place and no mask.
    return torch.div(X, least, rounding_mode="trunc", out=X).sign_()


def shrink(X: Tensor, least: Tensor | float, scratch: Tensor) -> None:
    """In place, every entry of X closer to zero by ``least``, 0 where its size is below that; ``scratch`` is like X."""
    X.sub_(torch.clamp(X, -least, least, out=scratch))  # type: ignore[arg-type]


def soft_sign(X: Tensor, recent: Tensor, decay: float) -> Tensor:
    """In place, X / √V with V ← γ V + X², 0 where all is zero, for X of any shape; no entry is beyond 1.

    With γ = 0 that is the sign, the published normalization (arXiv 2506.07254, section 4). With a memory of a few steps
    it is √(1-γ) times the sign for an entry that keeps its size, and goes through zero step by step for one that
    changes its sign. What that is worth: ``python -m benchmarks.ablation variants=[default,default_sign]``.

    Args:
        recent: √V, like X, which is updated in place.
        decay: γ.
    """
    # √V by hypot, as squares of X may be out of range; the least normal number keeps 0 / 0 away.
    least = torch.tensor(torch.finfo(X.dtype).tiny, dtype=X.dtype)
    torch.add(least, recent, alpha=math.sqrt(decay), out=recent)
    return X.div_(torch.hypot(recent, X, out=recent))


def mean_scale(decay: float, steps: int) -> float:
    """√(1 + γ + … + γ^(steps-1)), which makes :func:`soft_sign` divide by a mean of squares and not by their sum."""
    return math.sqrt((1 - decay**steps) / (1 - decay))


def whitened_direction(
    M: Tensor,
    Q_L: Tensor | None,
    Q_R: Tensor | None,
    eps: float,
    scratch: Scratch | None = None,
    recent: Tensor | None = None,
    decay: float = 0.0,
) -> Tensor:
    """U = Q_L sign(Q_Lᵀ M Q_R) Q_Rᵀ, (B, m, n): instantaneous normalization in a historical basis.

    U depends neither on the signs nor on the order of the eigenvectors, and ‖U‖_F = √(mn) when no rotated entry
    counts as zero (section 4 of the paper). The bases' dtype is that of the products and of U.

    Args:
        scratch: two tensors like U to compute in; U is one of them. None makes them.
        recent, decay: of :func:`soft_sign`, which takes the place of the sign if there is a memory (B, m, n). Entries
            are closer to zero by the noise level then, and U has a norm of its own.
    """
    basis = Q_R if Q_L is None else Q_L
    dtype = M.dtype if basis is None else basis.dtype
    scratch = scratch or (torch.empty_like(M, dtype=dtype), torch.empty_like(M, dtype=dtype))
    X = rotate(M if M.dtype == dtype else scratch[0].copy_(M), Q_L, Q_R, scratch)
    X = scratch[0].copy_(M) if X is M else X
    least = noise_level(X, eps)
    if recent is None:
        X = sign_from(X, least)
    else:
        if least is not None:
            shrink(X, least, scratch[1] if X is scratch[0] else scratch[0])
        X = soft_sign(X, recent, decay)
    return rotate_back(X, Q_L, Q_R, scratch)


def frobenius_factor(U: Tensor) -> Tensor:
    """What gives U (B, m, n) a Frobenius norm of √(mn), as signs have it: (B, 1, 1); 1 where U is zero."""
    norm = torch.linalg.vector_norm(U, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(U.dtype, torch.float32))
    return torch.where(norm > 0, math.sqrt(U.shape[-2] * U.shape[-1]) / norm, 1.0)


def start_vector(n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    """Where the power iteration of a matrix with n columns begins: any unit vector (n,) without structure."""
    v = torch.arange(1, n + 1, dtype=dtype, device=device).square().cos()
    return v / v.norm()


def spectral_factor(U: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What gives U (B, m, n) a spectral norm of √(mn) / 4, and its right singular vector: (B, 1, 1) and (B, n).

    By one power iteration from v (B, n), a unit vector, which estimates the norm from below. Where U v is zero, the
    norm counts as √(mn), the largest that U can have, and the iteration begins anew. 1 and v where U is zero.
    """
    image = U @ v.to(U.dtype).unsqueeze(-1)  # (B, m, 1)
    length = _norm(image)
    seen = length > torch.finfo(length.dtype).tiny
    image = torch.where(seen, image / length, start_vector(U.shape[-2], U.device, length.dtype).unsqueeze(-1))
    back = U.mT @ image.to(U.dtype)  # (B, n, 1)
    norm = _norm(back)
    moved = norm.isfinite() & (norm > torch.finfo(norm.dtype).tiny)
    largest = math.sqrt(U.shape[-2] * U.shape[-1])
    factor = largest / math.sqrt(STABLE_RANK) / torch.where(seen, norm, largest)
    after = torch.where(moved, back / norm, v.unsqueeze(-1)).squeeze(-1)
    return torch.where(moved, factor, 1.0), after.to(v.dtype)


def _norm(x: Tensor) -> Tensor:
    """Of columns (B, m, 1): (B, 1, 1), in full precision."""
    return torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))


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
