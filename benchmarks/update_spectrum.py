"""How the spectral norm of SPlus's updates depends on the width: recorded while small GPTs train on the text.

    python -m benchmarks.update_spectrum [--widths 32 64 128 256 512] [--steps 10 40 120]

Before its normalization an update has the Frobenius norm lr · 2√(mn)/(m+n); its spectral norm is that over the root of
its stable rank ‖U‖²_F / ‖U‖²_2. A spectral norm that falls with the width is a step that gets shorter where it acts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.csv_file import write_csv
from benchmarks.recording import recorded_states
from splus.scaling import step_scale
from splus.update import whitened_direction

FIELDS = ("width", "step", "spectral_norm", "frobenius_norm", "stable_rank", "share_of_rank", "top_of_momentum")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 40, 120])
    parser.add_argument("--output", type=Path, default=Path("results/update_spectrum"))
    options = parser.parse_args()
    rows = []
    for width in options.widths:
        for step, state in zip(options.steps, recorded_states(width, tuple(options.steps))):
            rows.append({"width": width, "step": step, **spectrum(state)})
    write_csv(rows, options.output / "update_spectrum.csv")
    Console().print(table(rows))


def spectrum(state: dict[str, Tensor]) -> dict[str, float]:
    """Of the update of a matrix in a state, in units of the learning rate; ``share_of_rank``: of min(m, n).

    ``top_of_momentum``: the gain along the momentum's first singular pair, vᵀ U w, in units of the learning rate.
    """
    M = state["momentum"]
    U = whitened_direction(M, state["basis_left"], state["basis_right"], eps=3e-7)[0]
    scale = step_scale(*U.shape)
    frobenius, spectral = float(torch.linalg.matrix_norm(U)), float(torch.linalg.matrix_norm(U, 2))
    left, _, right = torch.linalg.svd(M[0], full_matrices=False)
    rank = (frobenius / spectral) ** 2
    return {
        "spectral_norm": spectral * scale,
        "frobenius_norm": frobenius * scale,
        "stable_rank": rank,
        "share_of_rank": rank / min(U.shape),
        "top_of_momentum": float(left[:, 0] @ U @ right[0]) * scale,
    }


def table(rows: list[dict[str, float]]) -> Table:
    shown = Table(*(field.replace("_", " ") for field in FIELDS), box=box.SIMPLE_HEAD)
    shown.caption = "norms in units of the learning rate; the MLP's first matrix, (4 · width, width)"
    for row in rows:
        shown.add_row(*(f"{row[field]:.3g}" for field in FIELDS))
    return shown


if __name__ == "__main__":
    main()
