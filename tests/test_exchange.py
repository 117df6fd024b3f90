"""Gradients reach the owners of their matrices, and updates every rank that holds a piece, on real processes."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_ownership import owned, sharded

from splus.exchange import Exchange
from splus.matrices import matrix_layout
from splus.ownership import Box, whole

LAYOUTS = {
    0: matrix_layout((6, 5), max_side=9),
    1: matrix_layout((9, 4), split=3, max_side=9),
    2: matrix_layout((3, 10), max_side=4),
    3: matrix_layout((3, 4, 5), stacked=True, max_side=9),
    4: matrix_layout((1, 6), max_side=9),
}


def holdings(kind: str, ranks: int) -> dict[int, Sequence[Box | None]]:
    """Replicated, sharded by rows, or by rows within pairs of ranks that hold the same."""
    if kind == "replicated":
        return {i: [whole(layout)] * ranks for i, layout in LAYOUTS.items()}
    shards = ranks if kind == "sharded" else ranks // 2
    return {i: sharded(layout, shards, 0) * (ranks // shards) for i, layout in LAYOUTS.items()}


def round_trip(rank: int, kind: str, ranks: int, stepped: list[int]) -> None:
    """The "update" of a gradient is its negative: it must come back to each place it came from."""
    held = holdings(kind, ranks)
    exchange = Exchange(owned(LAYOUTS, held, ranks), dist.group.WORLD)
    like = torch.empty(0)
    truth, local = {}, {}
    for i in stepped:
        layout = LAYOUTS[i]
        truth[i] = torch.rand(layout.stack, layout.rows, layout.columns, generator=torch.Generator().manual_seed(i))
        box = held[i][rank]
        local[i] = torch.empty(0) if box is None else truth[i][box.within(whole(layout))].clone()
    gradients = exchange.gradients(exchange.send_gradients(local, like), like)
    for matrix, gradient in gradients.items():
        place = exchange.ownership.box(matrix).within(whole(LAYOUTS[matrix.parameter]))
        assert torch.equal(gradient, truth[matrix.parameter][place][0])
    home = {i: torch.full_like(values, torch.nan) for i, values in local.items()}
    transfer = exchange.send_updates({matrix: -gradient for matrix, gradient in gradients.items()}, local, like)
    for arrival in transfer.arrivals():
        home[arrival.message.matrix.parameter][exchange.place(arrival.message)] = arrival.values
    for i, values in local.items():
        assert torch.equal(home[i], -values)


@pytest.mark.parametrize("stepped", [[0, 1, 2, 3, 4], [3], []])
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [*((kind, ranks) for kind in ("replicated", "sharded") for ranks in (1, 2, 3, 4)), ("hybrid", 2), ("hybrid", 4)],
)
def test_what_travels_comes_back_to_where_it_was(kind: str, ranks: int, stepped: list[int]) -> None:
    on_ranks(ranks, round_trip, kind, ranks, stepped)
