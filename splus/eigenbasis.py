"""The eigenbasis of a batch of Kronecker factors: solvers, their checks and fallback, and when a refresh is due.

Shapes: factors S and bases Q are (B, n, n), symmetric and orthogonal; eigenvectors are columns.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Method = Literal["eigh", "qr"]

# A basis further than this from orthogonal, max |QᵀQ - I|, is not used: a solver can be wrong without an error.
# Right ones were within 2e-6 in fp32 up to n = 3072: python -m benchmarks.rounding prints it.
ORTHOGONALITY_LIMIT = 1e-3


def refresh_due(step: int, period: int, growth: float | None, offset: int = 0) -> bool:
    """Whether a matrix refreshes its bases at the end of its update number ``step`` (from 1).

    A factor is an average over its past, so an update changes it by about 1/step early on; refreshes at steps 1, 2,
    3, 4, 6, … whose intervals grow by the factor ``growth`` follow that change until they reach ``period``. From
    then on one is due every ``period`` steps, ``offset`` steps early; no interval is longer. Without growth: at step 1
    and at the multiples of ``period``, the schedule of the authors' file.
    """
    if step == 1:
        return True
    if growth is not None:
        last_early = math.ceil(period / (growth - 1))
        if step < last_early:
            return math.floor(math.log(step, growth)) != math.floor(math.log(step - 1, growth))
        if step == last_early:
            return True
    return (step + offset) % period == 0


def refreshed_basis(S: Tensor, Q: Tensor, method: Method) -> tuple[Tensor, list[bool]]:
    """New eigenbases for S, starting from Q.

    Args:
        S: factors (B, n, n).
        Q: the bases in use (B, n, n).
        method: "eigh", a full decomposition; "qr", one warm-started orthogonal iteration.

    Returns:
        The bases (B, n, n), and for each whether the solver failed on it, in fp64 too; a failed one is Q unchanged.
    """
    try:
        fresh = torch.linalg.eigh(S).eigenvectors if method == "eigh" else orthogonal_iteration(S, Q)
        sound = (orthogonality_error(fresh) <= ORTHOGONALITY_LIMIT) & S.isfinite().all(dim=-1).all(dim=-1)
        usable: list[bool] = sound.tolist()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # LinAlgError, a solver that the device lacks, or one that broke down
        fresh, usable = Q.clone(), [False] * len(Q)
    failed = [not good and not _retry_in_double(S[i], fresh[i], Q[i]) for i, good in enumerate(usable)]
    return fresh, failed


def _retry_in_double(S: Tensor, fresh: Tensor, Q: Tensor) -> bool:
    """Decompose one factor (n, n) in fp64 on the CPU into ``fresh``; on failure write Q there and return False."""
    fresh.copy_(Q)
    if not S.isfinite().all():
        return False
    try:
        basis = torch.linalg.eigh(S.to("cpu", torch.float64)).eigenvectors
    except RuntimeError:
        return False
    good = bool(orthogonality_error(basis) <= ORTHOGONALITY_LIMIT)
    if good:
        fresh.copy_(basis)
    return good


def orthogonal_iteration(S: Tensor, Q: Tensor) -> Tensor:
    """One step of orthogonal iteration, the Q factor of S Q with the strongest directions first: (B, n, n).

    Ordering the columns by their Rayleigh quotients matters: a direction that a rank-deficient S has not seen is
    rounding noise in S Q, and would turn every direction that is orthogonalised after it.
    """
    image = S @ Q
    order = (Q * image).sum(dim=-2).argsort(dim=-1, descending=True)
    return torch.linalg.qr(image.gather(-1, order.unsqueeze(-2).expand_as(image))).Q


def basis_drift(S: Tensor, Q: Tensor) -> Tensor:
    """‖offdiag(QᵀSQ)‖_F / ‖QᵀSQ‖_F, (B,): 0 where Q diagonalises S, and 0 for a zero factor."""
    rotated = Q.mT @ S @ Q
    total = torch.linalg.matrix_norm(rotated)
    off_diagonal = torch.linalg.matrix_norm(rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)))
    return off_diagonal / total.clamp_min(torch.finfo(S.dtype).tiny)


def orthogonality_error(Q: Tensor) -> Tensor:
    """max |QᵀQ - I| of each basis, (...,) for Q (..., n, n); NaN where Q is not finite."""
    gram = Q.mT @ Q
    return (gram - torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)).abs().amax(dim=(-2, -1))
