"""How the work of a step is shared among ranks: the plan alone, without any process.

    python -m benchmarks.plan [--ranks 8 64 1024] [--max-side 4096] [--period 10]

For each model, its matrices, and up to how many ranks the largest of them leaves an even share. By number of ranks:

work         of the busiest rank over the mean, in a whole period between refreshes
possible     the least that can be with whole matrices
waiting      the same where ranks wait for each other after each step, some of which have refreshes and some none:
             refreshes are spread over steps for one process, and are at the same steps on any number of ranks
state        of the fullest rank: momentum, factors and bases
DDP, FSDP    what the busiest rank sends and receives in a step, with parameters on every rank and cut by rows

Beyond its even share a model needs smaller matrices: `max_preconditioner_dim` cuts them into blocks (--max-side), which
changes the rule; nothing is cut for the sake of balance alone, so that the answer does not depend on the ranks.
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
EVEN = 1.1
BYTES = 4  # of an entry: state and updates are fp32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--max-side", type=int, default=4096, help="longer sides are cut into blocks")
    parser.add_argument("--period", type=int, default=10, help="steps between refreshes")
    options = parser.parse_args()
    for name, (layers, shapes) in MODELS.items():
        # Equal layers share their layouts, which saves most of the time.
        kinds = [matrix_layout(shape, stacked=len(shape) == 3, max_side=options.max_side) for shape in shapes]
        Console(width=120).print(model_table(name, kinds, layers, options))


def model_table(name: str, kinds: list[MatrixLayout], layers: int, options: argparse.Namespace) -> Table:
    work = [
        matrix_work(part, options.period)
        for layout in kinds
        for part in layout.parts
        for _ in range(layout.count(part))
    ] * layers
    even = int(EVEN * sum(work) / max(work))
    columns = ("ranks", "work", "possible", "waiting", "state", "DDP sent", "received", "FSDP sent", "received")
    table = Table(*columns, box=box.SIMPLE_HEAD, title_justify="left")
    table.title = f"{name}: {len(work)} matrices; within {EVEN} of an even share up to {even} ranks"
    for ranks in options.ranks:
        table.add_row(str(ranks), *row(kinds, layers, ranks, options.period))
    return table


def row(kinds: list[MatrixLayout], layers: int, ranks: int, period: int) -> list[str]:
    layouts = dict(enumerate(kinds * layers))
    turns = refresh_turns(layouts, period, spread=True)
    loads = Loads(ranks)
    everything = [[whole(layout)] * ranks for layout in kinds]
    replicated = own(layouts, dict(enumerate(everything * layers)), loads, period, turns)
    rows = [row_shards(layout, ranks) for layout in kinds]
    sharded = own(layouts, dict(enumerate(rows * layers)), Loads(ranks), period, turns)
    mean = sum(loads.total) / ranks
    traffic = [gigabytes(max(side)) for ownership in (replicated, sharded) for side in ownership.traffic()]
    ratios = (max(loads.total), least(replicated, period), busiest_steps(loads, period))
    return [*(f"{work / mean:.2f}" for work in ratios), gigabytes(max(state_entries(replicated))), *traffic]


def busiest_steps(loads: Loads, period: int) -> float:
    """The work of a period if each of its steps takes as long as its busiest rank."""
    refreshes = [sum(at_turn) for at_turn in zip(*loads.at_turn.values())]
    steady = [(total - refresh) / period for total, refresh in zip(loads.total, refreshes)]
    nothing = [0] * len(steady)
    return sum(max(map(sum, zip(steady, loads.at_turn.get(turn, nothing)))) for turn in range(period))


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
