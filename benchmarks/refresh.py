"""Ways of refreshing an eigenbasis, on factors recorded while a small GPT trains: time, drift, orthogonality.

    python -m benchmarks.refresh                        (five minutes on 2 cores)
    python -m benchmarks.refresh --widths 64 128        (half a minute)

A GPT of one block is trained on the text for 40 steps at each width, and the factors of its MLP's first matrix (sides
of one and four widths) are kept after 20, 30 and 40 steps. Each method follows them from the eigenbasis of the first,
refreshing as the optimizer does at its period of 10. At the last one:

seconds        median of rounds in which the methods take turns
drift          ‖offdiag(QᵀSQ)‖_F / ‖QᵀSQ‖_F, which strong directions dominate
correlation    the same of QᵀSQ scaled to a unit diagonal, over √n: every direction counts alike
orthogonality  max |QᵀQ - I|

"unrefreshed" is the basis as it was. Written to results/refresh/refresh.csv.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from benchmarks.csv_file import write_csv
from benchmarks.recording import recorded_states
from splus.eigenbasis import basis_drift, orthogonality_error, refreshed_basis

STEPS = (20, 30, 40)
Method = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refresh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="results/refresh")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for width in tqdm(arguments.widths, desc="widths"):
        states = recorded_states(width, STEPS)
        for name in ("factor_right", "factor_left"):
            if states[0][name].shape[-1] not in {row["n"] for row in rows}:
                rows += compare([state[name] for state in states], arguments.rounds)
    console = Console()
    console.print(table(rows))
    path = Path(arguments.output) / "refresh.csv"
    write_csv(rows, path)
    console.print(f"Written to {path}", highlight=False)


def compare(factors: list[Tensor], rounds: int) -> list[dict[str, Any]]:
    """A row for each method, following the factors from the eigenbasis of the first."""
    start = torch.linalg.eigh(factors[0]).eigenvectors
    bases = dict.fromkeys(METHODS, start)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for S in factors[1:]:
        for _ in range(rounds):
            fresh = {}
            for name, method in METHODS.items():
                started = time.perf_counter()
                fresh[name] = method(S, bases[name])
                times[name].append(time.perf_counter() - started)
        bases = fresh
    return [
        {
            "n": len(S[0]),
            "method": name,
            "seconds": statistics.median(times[name]),
            "drift": float(basis_drift(S, basis)),
            "correlation": float(correlation(S, basis)),
            "orthogonality": float(orthogonality_error(basis)),
        }
        for name, basis in bases.items()
    ]


def correlation(S: Tensor, Q: Tensor) -> Tensor:
    """‖C - I‖_F / √n of C = D^-½ QᵀSQ D^-½ with D the diagonal of QᵀSQ, (B,)."""
    rotated = Q.mT @ S @ Q
    diagonal = rotated.diagonal(dim1=-2, dim2=-1)
    smallest = torch.finfo(S.dtype).eps * diagonal.amax(dim=-1, keepdim=True)
    scale = diagonal.clamp_min(smallest).rsqrt()
    off_diagonal = rotated * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    off_diagonal.diagonal(dim1=-2, dim2=-1).zero_()
    return torch.linalg.matrix_norm(off_diagonal) / S.shape[-1] ** 0.5


def iterations(count: int) -> Method:
    """Warm-started orthogonal iterations by Householder QR, as in the optimizer."""

    def refresh(S: Tensor, Q: Tensor) -> Tensor:
        for _ in range(count):
            Q, _failed = refreshed_basis(S, Q, "qr")
        return Q

    return refresh


def cholesky_qr(S: Tensor, Q: Tensor) -> Tensor:
    """The same iteration by Cholesky QR of normalised columns: products and triangular solves alone."""
    image = S @ Q
    order = (Q * image).sum(dim=-2).argsort(dim=-1, descending=True)
    image = image.gather(-1, order.unsqueeze(-2).expand_as(image))
    image /= torch.linalg.vector_norm(image, dim=-2, keepdim=True).clamp_min(torch.finfo(S.dtype).tiny)
    triangle, _info = torch.linalg.cholesky_ex(image.mT @ image)
    return torch.linalg.solve_triangular(triangle.mT, image, upper=True, left=False)


METHODS: dict[str, Method] = {
    "unrefreshed": lambda _, Q: Q,
    "eigh": lambda S, Q: refreshed_basis(S, Q, "eigh")[0],
    "eigh in fp64": lambda S, _: torch.linalg.eigh(S.double()).eigenvectors.float(),
    "QR iteration": iterations(1),
    "two QR iterations": iterations(2),
    "Cholesky QR iteration": cholesky_qr,
}


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table("n", "method", "ms", "over QR", "drift", "correlation", "orthogonality")
    for row in rows:
        unit = next(r["seconds"] for r in rows if r["n"] == row["n"] and r["method"] == "QR iteration")
        times = (
            ["", ""]
            if row["method"] == "unrefreshed"
            else [f"{row['seconds'] * 1e3:.1f}", f"{row['seconds'] / unit:.2f}"]
        )
        shown.add_row(
            str(row["n"]), row["method"], *times, f"{row['drift']:.3f}", f"{row['correlation']:.3f}",
            f"{row['orthogonality']:.1e}", end_section=row["method"] == list(METHODS)[-1],
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main()
