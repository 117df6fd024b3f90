"""What the benchmarks of shared work say of plans and of exchanges."""

import itertools
from typing import Any

import torch
from ranks import on_ranks

from benchmarks import exchange, plan
from benchmarks.contenders import ParameterSet
from splus.matrices import matrix_layout
from splus.ownership import Loads, matrix_work, own, whole
from splus.plan import refresh_turns

PERIOD = 10


def test_no_sharing_has_less_work_than_the_least_possible() -> None:
    """Every sharing of a few matrices among three ranks is tried; two have the bound itself."""
    for shapes, reached in (
        (((8, 8),) * 4, True),
        (((9, 2), (8, 8), (3, 3), (8, 4), (5, 5)), False),
        (((8, 8),), True),
    ):
        layouts = {i: matrix_layout(shape, max_side=9) for i, shape in enumerate(shapes)}
        everything = {i: [whole(layout)] * 3 for i, layout in layouts.items()}
        ownership = own(layouts, everything, Loads(3), PERIOD, refresh_turns(layouts, PERIOD, spread=True))
        work = [matrix_work(layout.parts[0], PERIOD) for layout in layouts.values()]
        possible = min(
            max(sum(w for w, owner in zip(work, owners) if owner == rank) for rank in range(3))
            for owners in itertools.product(range(3), repeat=len(work))
        )
        least = plan.least(ownership, PERIOD)
        assert least == possible if reached else least <= possible


def test_a_step_takes_as_long_as_its_busiest_rank() -> None:
    """Two ranks with a steady 10 a step; one refreshes (30) at turn 0, the other (50) at turn 1."""
    loads = Loads(2)
    loads.give(0, 10 * PERIOD + 30, 0, 30)
    loads.give(1, 10 * PERIOD + 50, 1, 50)
    assert plan.busiest_steps(loads, PERIOD) == 10 * PERIOD + 30 + 50


def measured(rank: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return exchange.measure(ParameterSet(matrices=[(6, 4), (5, 5), (4, 6), (7, 3)], others=[(9,)]), periods=1)


def test_the_bytes_handed_over_are_those_planned() -> None:
    """Counted where they are handed over; each of two ranks says the same of the busiest."""
    first, second = on_ranks(2, measured)
    for row, other in zip(first, second):
        assert row["sent"] == other["sent"] == row["planned"]
        assert (row["way"] == "replicated") == (row["sent"] == 0)
    states = {row["way"]: row["state"] for row in first}
    assert states["DDP"] == states["FSDP"] < states["replicated"]
