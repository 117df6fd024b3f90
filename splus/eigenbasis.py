"""The eigenbasis of a batch of Kronecker factors: solvers, their checks and fallback.

Shapes: factors S and bases Q are (B, n, n), symmetric and orthogonal; eigenvectors are columns.
"""

import warnings
from typing import Literal

import torch
from torch import Tensor

Method = Literal["eigh", "qr"]

# A basis further than this from orthogonal, ‖QᵀQ - I‖_F / √n, is not used: a solver can be wrong without an error.
# Right ones were within 2e-6 in fp32 up to n = 3072: python -m benchmarks.rounding prints it.
ORTHOGONALITY_LIMIT = 1e-3


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
        fresh = torch.linalg.eigh(_within_range(S)).eigenvectors if method == "eigh" else orthogonal_iteration(S, Q)
        sound = (column_error(fresh) <= ORTHOGONALITY_LIMIT) & S.isfinite().all(dim=-1).all(dim=-1)
        usable: list[bool] = sound.tolist()
    except RuntimeError as error:  # LinAlgError, a solver that the device lacks, or one that broke down
        if _is_out_of_memory(error):
            raise
        if isinstance(error, NotImplementedError):
            _say_not_implemented(S.device)
        fresh, usable = Q.clone(), [False] * len(Q)
    failed = [not good and not _retry_in_double(S[i], fresh[i], Q[i]) for i, good in enumerate(usable)]
    return fresh, failed


def _retry_in_double(S: Tensor, fresh: Tensor, Q: Tensor) -> bool:
    """Decompose one factor (n, n) in fp64 on the CPU into ``fresh``; on failure write Q there and return False."""
    fresh.copy_(Q)
    if not S.isfinite().all():
        return False
    try:
        basis = torch.linalg.eigh(S.cpu().double()).eigenvectors  # some devices have no fp64, not to convert to either
    except RuntimeError as error:
        if _is_out_of_memory(error):
            raise
        return False
    good = bool(column_error(basis) <= ORTHOGONALITY_LIMIT)
    if good:
        fresh.copy_(basis.to(fresh.dtype))
    return good


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory is what is missing; a CPU's allocator says so in a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _say_not_implemented(device: torch.device) -> None:
    # Of one text, which Python's own filter shows once.
    warnings.warn(
        f"This version of torch has no solver for eigenbases on {device.type}: they are decomposed on the CPU in fp64, "
        "which is slower. A larger precondition_frequency makes it rarer.",
        stacklevel=2,
    )


def _within_range(S: Tensor) -> Tensor:
    """S (B, n, n), by a power of two where its largest entry is beyond 2**±48, so that the basis is that at scale 1.

    Beyond 2**±51 LAPACK scales a matrix itself, by no power of two, and rounding turns what is degenerate.
    """
    largest = S.diagonal(dim1=-2, dim2=-1).amax(dim=-1)
    exponent = torch.frexp(largest).exponent
    shift = torch.where((exponent.abs() > 48) & largest.isfinite(), -exponent, 0).clamp(-126, 126)
    return S * torch.ldexp(torch.ones_like(largest), shift)[:, None, None]


def orthogonal_iteration(S: Tensor, Q: Tensor) -> Tensor:
    """One step of orthogonal iteration, the Q factor of S Q with the strongest directions first: (B, n, n).

    Ordering the columns by their Rayleigh quotients matters: a direction that a rank-deficient S has not seen is
    rounding noise in S Q, and would turn every direction that is orthogonalised after it.
    """
    image = S @ Q
    order = torch.linalg.vecdot(Q, image, dim=-2).argsort(dim=-1, descending=True)
    image = image.gather(-1, order.unsqueeze(-2).expand_as(image))
    reflectors, scales = torch.geqrf(image)
    del image  # torch.linalg.qr would hold this and make R as well
    return torch.linalg.householder_product(reflectors, scales)


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


def column_error(Q: Tensor) -> Tensor:
    """An estimate of ‖QᵀQ - I‖_F / √n, (...,) for Q (..., n, n), from 8 random signs; NaN where Q is not finite.

    E ‖(QᵀQ - I) v‖² is the squared norm for a vector v of random signs (Hutchinson), at 1/n of the cost of QᵀQ. A
    single column that is not one gives 1/√n.
    """
    n = Q.shape[-1]
    signs = torch.randint(2, (n, 8), generator=torch.Generator().manual_seed(n)).mul(2).sub(1).to(Q.device, Q.dtype)
    return torch.linalg.matrix_norm(Q.mT @ (Q @ signs) - signs) / (8 * n) ** 0.5
