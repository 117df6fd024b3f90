"""How the work of a step is shared among ranks: the plan alone, without any process.

    python -m benchmarks.plan [--ranks 8 64 1024] [--max-side 4096] [--period 10]

For each model and number of ranks: the matrices; the busiest rank's work over the mean, and the least possible with
these matrices; the state of the fullest rank; and the bytes that the busiest rank sends and receives in a step, with
parameters on every rank (DDP) and with rows shared among the ranks (FSDP).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from splus.matrices import MatrixLayout, matrix_layout
from splus.ownership import Box, Loads, Ownership, held_box, matrix_work, own, whole
from splus.plan import refresh_turns

# Layers, and the shapes of the matrices of one; stacked experts are one parameter.
MODELS: Mapping[str, tuple[int, list[tuple[int, ...]]]] = {
    "GPT-2, 12 layers of 768": (12, [*[(768, 768)] * 4, (3072, 768), (768, 3072)]),
    "Llama 7B, 32 layers of 4096": (32, [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008)]),
    "64 experts, 16 layers of 1024": (16, [*[(1024, 1024)] * 4, *[(64, 2816, 1024)] * 2, (64, 1024, 2816)]),
}
BYTES = 4  # of an entry: state and updates are fp32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--max-side", type=int, default=4096, help="longer sides are cut into blocks")
    parser.add_argument("--period", type=int, default=10, help="steps between refreshes")
    options = parser.parse_args()
    table = Table(
        *("", "ranks", "matrices", "work, max/mean", "least possible", "state"),
        *("DDP sent", "received", "FSDP sent", "received"),
        box=box.SIMPLE_HEAD,
    )
    for name, (layers, shapes) in MODELS.items():
        layouts = {
            i: matrix_layout(shape, stacked=len(shape) == 3, max_side=options.max_side)
            for i, shape in enumerate(shapes * layers)
        }
        for ranks in options.ranks:
            table.add_row(name, str(ranks), *row(layouts, ranks, options.period))
    Console().print(table)


def row(layouts: Mapping[int, MatrixLayout], ranks: int, period: int) -> list[str]:
    turns = refresh_turns(layouts, period, spread=True)
    loads = Loads(ranks)
    replicated = own(layouts, {i: [whole(layout)] * ranks for i, layout in layouts.items()}, loads, period, turns)
    held = {i: row_shards(layout, ranks) for i, layout in layouts.items()}
    sharded = own(layouts, held, Loads(ranks), period, turns)
    mean = sum(loads.total) / ranks
    traffic = [gigabytes(max(side)) for ownership in (replicated, sharded) for side in ownership.traffic()]
    state = gigabytes(max(state_entries(replicated)))
    return [
        *(f"{len(replicated.owners)}", f"{max(loads.total) / mean:.2f}", f"{least(replicated, period) / mean:.2f}"),
        *(state, *traffic),
    ]


def row_shards(layout: MatrixLayout, ranks: int) -> list[Box | None]:
    """What ranks hold when the first dimension is cut evenly, as fully_shard does."""
    length = layout.shape[0]
    size = math.ceil(length / ranks)
    held = []
    for rank in range(ranks):
        start = min(rank * size, length)
        sizes = (min(size, length - start), *layout.shape[1:])
        held.append(held_box(layout, (start, *(0 for _ in layout.shape[1:])), sizes))
    return held


def least(ownership: Ownership, period: int) -> float:
    """No sharing of whole matrices has a busiest rank with less work than this."""
    work = sorted(
        (matrix_work(ownership.layouts[matrix.parameter].parts[matrix.part], period) for matrix in ownership.owners),
        reverse=True,
    )
    # Of the k · ranks + 1 largest, some rank has k + 1, each at least as large as the last of them.
    crowded = ((k + 1) * work[k * ownership.ranks] for k in range((len(work) - 1) // ownership.ranks + 1))
    return max(sum(work) / ownership.ranks, *crowded)


def state_entries(ownership: Ownership) -> list[int]:
    """Momentum, factors and bases of each rank, in entries."""
    entries = [0] * ownership.ranks
    for matrix, owner in ownership.owners.items():
        part = ownership.layouts[matrix.parameter].parts[matrix.part]
        sides = part.rotate_left * part.m**2 + part.rotate_right * part.n**2
        entries[owner] += part.m * part.n + 2 * sides
    return entries


def gigabytes(entries: int) -> str:
    return f"{entries * BYTES / 1e9:.3g} GB"


if __name__ == "__main__":
    main()
