"""How large rounding is: what the defaults of ``eps``, of the orthogonality limit and of ``matmul_dtype`` rest on.

    python -m benchmarks.rounding

Gradients m×n of rank r in fp32 span r directions of each side. What they leave in the other directions of a
refreshed basis, where exact arithmetic leaves zero, is noise; it is given beside the smallest percentile of the
signal, both over ‖M‖_F, with the basis's ‖QᵀQ - I‖_F / √n.

Then, for the MLP's first matrix of a small GPT after 40 steps on the text: the share of rotated entries whose sign
bf16 products flip, and how far they turn the direction, ‖U - U'‖_F / ‖U‖_F. Two minutes on two cores.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.recording import recorded_states
from splus.eigenbasis import Method, column_error, refreshed_basis
from splus.update import accumulate_factors, rotate, whitened_direction

SHAPES = ((64, 256, 64), (96, 384, 96), (256, 1024, 256), (256, 1024, 16), (768, 768, 32), (768, 3072, 768))
STEPS = 5
WIDTHS = (64, 128, 256, 512)


def main() -> None:
    table = Table("m×n", "rank", "solver", "largest noise", "1% of signal", "orthogonality", title="over ‖M‖_F, fp32")
    for m, n, rank in SHAPES:
        for method in ("eigh", "qr"):
            noise, signal, error = measure(m, n, rank, method)
            table.add_row(f"{m}×{n}", str(rank), method, f"{noise:.1e}", f"{signal:.1e}", f"{error:.1e}")
    Console().print(table)
    table = Table("m×n", "signs flipped", "direction turned", title="bf16 products")
    for width in WIDTHS:
        flipped, turned = flipped_signs(width)
        table.add_row(f"{4 * width}×{width}", f"{flipped:.2%}", f"{turned:.3f}")
    Console().print(table)


def measure(m: int, n: int, rank: int, method: Method) -> tuple[float, float, float]:
    """Largest noise, first percentile of the signal, and orthogonality error, for one shape and solver."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    left, right = normal(1, m, rank), normal(1, rank, n)
    M, L, R = torch.zeros(1, m, n), torch.zeros(1, m, m), torch.zeros(1, n, n)
    Q_L, Q_R = torch.eye(m)[None], torch.eye(n)[None]
    for step in range(STEPS):
        G = left @ normal(1, rank, rank) @ right
        M.lerp_(G, 0.1)
        accumulate_factors(G, L, R, 0.97)
        solver: Method = "eigh" if step == 0 else method
        Q_L, Q_R = refreshed_basis(L, Q_L, solver)[0], refreshed_basis(R, Q_R, solver)[0]
    X = rotate(M, Q_L, Q_R)[0].abs() / M.norm()
    seen = is_seen(L, Q_L, rank)[:, None] & is_seen(R, Q_R, rank)[None, :]
    noise = X[~seen].max().item() if (~seen).any() else 0.0
    signal = X[seen].flatten()[:1_000_000].quantile(0.01).item()
    return noise, signal, max(column_error(Q_L).item(), column_error(Q_R).item())


def flipped_signs(width: int) -> tuple[float, float]:
    """The share of signs that bf16 products flip in a recorded state, and the distance between the directions."""
    (state,) = recorded_states(width, (40,))
    M, Q_L, Q_R = (state[name] for name in ("momentum", "basis_left", "basis_right"))
    exact = rotate(M, Q_L, Q_R).sign()
    low = rotate(M.bfloat16(), Q_L.bfloat16(), Q_R.bfloat16()).sign()
    U, turned = whitened_direction(M, Q_L, Q_R, 0.0), whitened_direction(M, Q_L.bfloat16(), Q_R.bfloat16(), 0.0)
    return (exact != low).float().mean().item(), ((U - turned.float()).norm() / U.norm()).item()


def is_seen(S: Tensor, Q: Tensor, rank: int) -> Tensor:
    """(n,): which eigenvectors have one of the ``rank`` largest eigenvalues."""
    strength = (Q * (S @ Q)).sum(dim=-2)[0]
    return strength >= strength.topk(rank).values[-1]


if __name__ == "__main__":
    main()
