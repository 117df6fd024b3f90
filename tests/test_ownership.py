"""Who owns which matrix, and what travels for it: no entry is lost, none is sent twice, and ranks work alike."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splus.matrices import MatrixLayout, matrix_layout
from splus.ownership import Box, Loads, Matrix, Ownership, Route, held_box, matrix_box, own, whole


def chunk(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows of a rank as torch.chunk and DTensor cut them: equal but for the last ones, which may be empty."""
    size = math.ceil(length / ranks)
    start = min(rank * size, length)
    return start, min(size, length - start)


def sharded(layout: MatrixLayout, ranks: int, dim: int) -> list[Box | None]:
    boxes = []
    for rank in range(ranks):
        offset, sizes = [0] * len(layout.shape), list(layout.shape)
        offset[dim], sizes[dim] = chunk(layout.shape[dim], ranks, rank)
        boxes.append(held_box(layout, offset, sizes))
    return boxes


def owned(layouts: Mapping[int, MatrixLayout], held: Mapping[int, Sequence[Box | None]], ranks: int) -> Ownership:
    return own(layouts, held, Loads(ranks), period=10, turns=dict.fromkeys(layouts, 0))


layouts = st.sampled_from(
    [
        matrix_layout((6, 5), max_side=9),
        matrix_layout((9, 4), split=3, max_side=9),
        matrix_layout((7, 10), max_side=4),
        matrix_layout((3, 4, 5), stacked=True, max_side=9),
        matrix_layout((2, 6, 5), stacked=True, split=2, max_side=2),
        matrix_layout((5, 2, 3), max_side=4),
        matrix_layout((1, 6), max_side=9),
    ]
)


@given(layouts, st.integers(1, 5))
def test_boxes_of_the_matrices_tile_the_parameter(layout: MatrixLayout, ranks: int) -> None:
    entries = torch.arange(math.prod(layout.shape)).view(layout.stack, layout.rows, layout.columns)
    seen = []
    for index, part in enumerate(layout.parts):
        matrices = layout.split(entries.view(layout.shape), index)
        for i in range(layout.count(part)):
            region = entries[matrix_box(layout, part, i).within(whole(layout))]
            assert torch.equal(region[0], matrices[i])
            seen.append(region.flatten())
    assert torch.equal(torch.cat(seen).sort().values, entries.flatten())


@settings(max_examples=200, deadline=None)
@given(st.lists(layouts, min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_gradients_reach_the_owner_and_updates_every_holder(
    chosen: list[MatrixLayout], ranks: int, data: st.DataObject
) -> None:
    by_parameter = dict(enumerate(chosen))
    held = {}
    for parameter, layout in by_parameter.items():
        dim = data.draw(st.sampled_from([None, 0, *([1] if len(layout.shape) == 2 else [])]))
        held[parameter] = [whole(layout)] * ranks if dim is None else sharded(layout, ranks, dim)
    ownership = owned(by_parameter, held, ranks)
    truth = {p: torch.rand(layout.stack, layout.rows, layout.columns) for p, layout in by_parameter.items()}
    for kind in range(2):
        routes = [Route(rank, ranks, ownership.messages_of(rank)[kind]) for rank in range(ranks)]
        for source in range(ranks):
            for target in range(ranks):
                assert routes[source].sent[target] == routes[target].received[source]
    for rank in range(ranks):
        messages, updates = ([m for m in of if m.target == rank] for of in ownership.messages_of(rank))
        for matrix in ownership.of(rank):
            covered = torch.zeros_like(truth[matrix.parameter])
            for message in messages:
                if message.matrix == matrix:
                    covered[message.box.within(whole(by_parameter[matrix.parameter]))] += 1
            own_box = ownership.box(matrix).within(whole(by_parameter[matrix.parameter]))
            assert covered[own_box].eq(1).all()
            assert covered.sum() == covered[own_box].numel()
        for parameter, layout in by_parameter.items():
            covered = torch.zeros_like(truth[parameter])
            for message in updates:
                if message.matrix.parameter == parameter:
                    covered[message.box.within(whole(layout))] += 1
            box = held[parameter][rank]
            assert covered.sum() == (0 if box is None else box.numel)
            assert box is None or covered[box.within(whole(layout))].eq(1).all()


def test_what_the_owner_holds_does_not_travel() -> None:
    layout = matrix_layout((6, 5), max_side=9)
    ownership = owned({0: layout, 1: layout}, {i: [whole(layout)] * 2 for i in range(2)}, 2)
    for rank in range(2):
        route = Route(rank, 2, ownership.messages_of(rank)[0])
        assert route.send_sizes[1 - rank] == 0 == route.receive_sizes[1 - rank]


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 8))
def test_owners_work_alike_as_far_as_the_largest_matrix_allows(work: list[int], ranks: int) -> None:
    loads = Loads(ranks)
    for amount in sorted(work, reverse=True):
        loads.give(loads.least(turn=0), amount, 0, 0)
    assert max(loads.total) <= sum(work) / ranks + max(work, default=0)


def test_refreshes_of_each_step_are_spread_over_the_ranks() -> None:
    """Of four equal matrices with two turns, no rank has both of a turn."""
    layouts = {i: matrix_layout((4, 4), max_side=9) for i in range(4)}
    held = {i: [whole(layout)] * 2 for i, layout in layouts.items()}
    ownership = own(layouts, held, Loads(2), period=10, turns={0: 0, 1: 5, 2: 0, 3: 5})
    owner = {matrix.parameter: rank for matrix, rank in ownership.owners.items()}
    assert owner[0] != owner[2]
    assert owner[1] != owner[3]
    assert sorted(owner.values()) == [0, 0, 1, 1]


def test_groups_share_what_earlier_ones_have_left() -> None:
    """The second group's large matrix goes to the rank that the first group's did not go to."""
    layouts = {0: matrix_layout((6, 6), max_side=9), 1: matrix_layout((3, 3), max_side=9)}
    held = {i: [whole(layout)] * 2 for i, layout in layouts.items()}
    loads = Loads(2)
    first, second = (own(layouts, held, loads, period=10, turns={0: 0, 1: 1}) for _ in range(2))
    assert {first.owners[m] for m in first.owners if m.parameter == 0} == {0}
    assert {second.owners[m] for m in second.owners if m.parameter == 0} == {1}


def test_a_matrix_keeps_its_owner() -> None:
    layouts = {0: matrix_layout((6, 6), max_side=9), 1: matrix_layout((4, 6), max_side=9)}
    held = {i: [whole(layout)] * 2 for i, layout in layouts.items()}
    ownership = own(layouts, held, Loads(2), 10, {0: 0, 1: 1}, kept={Matrix(1, 0, 0): 0})
    assert list(ownership.owners.values()) == [1, 0]


def test_sharding_within_a_side_is_refused() -> None:
    layout = matrix_layout((4, 6, 3), max_side=99)  # a convolution, whose columns are the last two dimensions
    assert held_box(layout, (0, 2, 0), (4, 2, 3)) is not None
    with pytest.raises(ValueError, match="not in one piece along a side"):
        held_box(layout, (0, 0, 1), (4, 6, 1))
