"""A parameter of any shape is the matrices it stands for: each is stepped as if it were alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference, draws, drive
from torch import Tensor, nn

import splus.buckets
from splus import PAPER, SPlus
from splus.matrices import matrix_layout
from splus.update import whitened_direction

# All that a step changes; a large decay so that its scale shows.
SETTINGS: dict[str, Any] = {"lr": 0.3, "weight_decay": 2.0, "ema_decay": 0.9, "whiten": True, "spread_refreshes": False}
STEPS = 25


def trained(starts: Sequence[Tensor], gradients: Sequence[Tensor], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and averages of parameters that start at ``starts``, after the steps of ``gradients`` (steps, *shape)."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = SPlus(parameters, **{**SETTINGS, **options})
    drive(optimizer, parameters, zip(*gradients))
    return [p.detach() for p in parameters], [optimizer.state[p]["average"] for p in parameters]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def assert_cut_by_hand(whole: tuple[int, ...], pieces: Sequence[Any], **options: Any) -> None:
    """A parameter of shape ``whole`` moves bit for bit as its ``pieces`` (indices into it) do as parameters."""
    start, gradients = draws(1, *whole, seed=9)[0], draws(STEPS, *whole)
    (weights,), (averages,) = trained([start], [gradients], **options)
    alone = trained(
        [start[piece] for piece in pieces], [torch.stack([G[piece] for G in gradients]) for piece in pieces]
    )
    assert same([weights[piece] for piece in pieces], alone[0])
    assert same([averages[piece] for piece in pieces], alone[1])
    assert sum(start[piece].numel() for piece in pieces) == start.numel()


@pytest.mark.parametrize("kernel", [(3,), (3, 2), (2, 1, 2)])
def test_convolution_is_the_linear_layer_of_its_flat_weight(kernel: tuple[int, ...]) -> None:
    """(out, in, *k) moves exactly as out × in·k."""
    shape = (4, 3, *kernel)
    start, gradients = draws(1, *shape, seed=9)[0], draws(STEPS, *shape)
    weights, averages = trained([start], [gradients])
    flat = trained([start.flatten(1)], [gradients.flatten(2)])
    assert same([weights[0].flatten(1)], flat[0])
    assert same([averages[0].flatten(1)], flat[1])


def test_stacked_experts_are_separate_matrices() -> None:
    """(E, m, n) with stacked=True moves exactly as E parameters; without, as one matrix."""
    pieces = [(expert,) for expert in range(3)]
    assert_cut_by_hand((3, 4, 5), pieces, stacked=True)
    with pytest.raises(AssertionError):
        assert_cut_by_hand((3, 4, 5), pieces)


def test_two_leading_dimensions_of_experts() -> None:
    """All leading dimensions of a stack count matrices."""
    assert_cut_by_hand((2, 3, 4, 2), [(i, j) for i in range(2) for j in range(3)], stacked=True)


@pytest.mark.parametrize(
    ("shape", "options", "pieces"),
    [
        ((12, 4), {"split": 3}, [(slice(0, 4),), (slice(4, 8),), (slice(8, 12),)]),
        ((8, 4), {"split": (4, 2, 2)}, [(slice(0, 4),), (slice(4, 6),), (slice(6, 8),)]),
        ((8, 4), {"split": (2, 4, 2)}, [(slice(0, 2),), (slice(2, 6),), (slice(6, 8),)]),
        ((4, 9), {"split": 3, "split_dim": 1}, [(slice(None), slice(i, i + 3)) for i in (0, 3, 6)]),
        ((4, 9), {"split": (5, 4), "split_dim": 1}, [(slice(None), slice(0, 5)), (slice(None), slice(5, 9))]),
        (
            (2, 6, 4),
            {"split": (4, 2), "stacked": True},
            [(i, rows) for i in range(2) for rows in (slice(0, 4), slice(4, 6))],
        ),
        (
            (2, 4, 6),
            {"split": (4, 2), "split_dim": 1, "stacked": True},
            [(i, slice(None), columns) for i in range(2) for columns in (slice(0, 4), slice(4, 6))],
        ),
        ((6, 2, 2), {"split": 2}, [(slice(0, 3),), (slice(3, 6),)]),
    ],
)
def test_sections_are_separate_matrices(shape: tuple[int, ...], options: dict[str, Any], pieces: list[Any]) -> None:
    """Sections of a fused projection, equal or not, by rows or columns, step and decay as parameters of their own."""
    assert_cut_by_hand(shape, pieces, **options)


@pytest.mark.parametrize(
    ("shape", "options", "rows", "columns"),
    [
        ((8, 8), {}, [(0, 4), (4, 8)], [(0, 4), (4, 8)]),
        ((7, 4), {}, [(0, 4), (4, 7)], [(0, 4)]),
        ((10, 9), {}, [(0, 4), (4, 7), (7, 10)], [(0, 3), (3, 6), (6, 9)]),
    ],
)
def test_blocks_are_matrices_with_the_step_of_the_whole(
    shape: tuple[int, int], options: dict[str, Any], rows: list[tuple[int, int]], columns: list[tuple[int, int]]
) -> None:
    """A side beyond the limit is cut evenly; each block is a matrix that steps and decays by the whole's s."""
    m, n = shape
    start, gradients = draws(1, *shape, seed=9)[0], draws(STEPS, *shape)
    (weights,), (averages,) = trained([start], [gradients], max_preconditioner_dim=4, **options)
    for top, bottom in rows:
        for left, right in columns:
            block = (slice(top, bottom), slice(left, right))
            # A block's own scale is undone by the learning rate; with it goes the scale of its decay.
            lr = SETTINGS["lr"] * (bottom - top + right - left) / (m + n)
            alone = trained([start[block]], [torch.stack([G[block] for G in gradients])], lr=lr)
            torch.testing.assert_close([weights[block]], alone[0], rtol=0, atol=1e-13)
            torch.testing.assert_close([averages[block]], alone[1], rtol=0, atol=1e-13)


def test_blocks_of_sections() -> None:
    """A section that is too long is cut into blocks that keep the section's step: exactly, but for soft signs.

    The last bit of torch's hypot depends on where in memory an entry lies.
    """
    start, gradients = draws(1, 12, 4, seed=9)[0], draws(STEPS, 12, 4)
    for decay, tolerance in ((0.0, 0.0), (0.5, 1e-13)):
        options: dict[str, Any] = {"max_preconditioner_dim": 4, "normalization_decay": decay}
        (weights,), _ = trained([start], [gradients], split=2, **options)
        for rows in (slice(0, 6), slice(6, 12)):
            (section,), _ = trained([start[rows]], [gradients[:, rows]], **options)
            torch.testing.assert_close(weights[rows], section, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("shape", "oversized", "left", "right", "scale"),
    [
        ((12, 5), "unrotated", False, True, 2 / 17),
        ((5, 12), "unrotated", True, False, 2 / 17),
        ((12, 9), "unrotated", False, False, 2 / 21),
        ((8, 5), "unrotated", True, True, 2 / 13),
        # The authors' file stops rotating at the limit, and stops scaling by shape beyond it.
        ((7, 7), "published", True, True, 2 / 14),
        ((8, 5), "published", False, True, 2 / 13),
        ((8, 8), "published", False, False, 2 / 16),
        ((9, 5), "published", False, True, 1e-3),
        ((5, 9), "published", True, False, 1e-3),
        ((9, 9), "published", False, False, 1e-3),
    ],
)
def test_sides_left_unrotated(shape: tuple[int, int], oversized: str, left: bool, right: bool, scale: float) -> None:
    """A side beyond the limit of 8 has neither factor nor basis, and the step has the scale that goes with it."""
    options = {**PAPER, "lr": 0.3, "weight_decay": 2.0, "precondition_frequency": 5}
    parameter = nn.Parameter(draws(1, *shape, seed=9)[0])
    optimizer = SPlus([parameter], **{**options, "oversized": oversized, "max_preconditioner_dim": 8})
    state = optimizer.state[parameter]
    assert ("factor_left" in state, "basis_left" in state) == (left, left)
    assert ("factor_right" in state, "basis_right" in state) == (right, right)
    reference = Reference(
        parameter, 0.3, (0.9, 0.999), eps=0.0, normalization_decay=0.0, weight_decay=2.0, precondition_frequency=5,
        refresh_growth=None, refresh_method="eigh", spread=False, left=left, right=right, scale=scale,
        step_norm="frobenius",
    )  # fmt: skip
    if shape == (8, 5) and left:
        # The only case whose longer side is rotated: give it one right basis from the start.
        for name, factor in (("factor_left", reference.L), ("factor_right", reference.R)):
            factor.copy_(torch.diag(torch.arange(1.0, 1 + len(factor), dtype=torch.float64)))
            state[name].copy_(factor)
    for G in draws(STEPS, *shape):
        drive(optimizer, [parameter], [[G]])
        reference.step(G)
    torch.testing.assert_close(parameter.detach(), reference.W, rtol=0, atol=1e-11)
    torch.testing.assert_close(state["average"], reference.average, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("whiten", "shape", "whitened"),
    [
        (True, (9, 3), True),
        (True, (1, 3), False),
        (True, (3, 1), False),
        (True, (1, 2, 2), False),
        (True, (2, 1, 2), True),
        (True, (5,), False),
        ("auto", (8, 3), True),
        ("auto", (9, 3), False),
        ("auto", (2, 3, 3), False),
        ("2d", (1, 3), True),
        ("2d", (9, 3), True),
        ("2d", (2, 2, 2), False),
        (False, (4, 4), False),
    ],
)
def test_which_shapes_are_whitened(whiten: bool | str, shape: tuple[int, ...], whitened: bool) -> None:
    """Each value of ``whiten`` takes the shapes it says; the limit on a side is 8."""
    parameter = nn.Parameter(torch.zeros(shape))
    options: dict[str, Any] = {"max_preconditioner_dim": 8, "elementwise_scale": 1e-3, "step_norm": "frobenius"}
    optimizer = SPlus([parameter], lr=0.5, whiten=whiten, weight_decay=0.0, **options)
    drive(optimizer, [parameter], [[torch.ones(shape)]])
    scale = 2 / (shape[0] + parameter[0].numel()) if whitened else 1e-3
    torch.testing.assert_close(parameter.detach(), torch.full(shape, -0.5 * scale))
    assert ("basis_right" in optimizer.state[parameter]) == whitened


@pytest.mark.parametrize("shape", [(), (1,), (6,), (1, 6), (6, 1), (1, 1)])
def test_vectors_of_any_shape_take_the_elementwise_rule(shape: tuple[int, ...]) -> None:
    """Scalars, vectors, single rows and columns move as the reference's elementwise rule."""
    start, gradients = draws(1, *shape, seed=9)[0], draws(STEPS, *shape)
    reference = Reference(start, 0.3, weight_decay=2.0, ema_decay=0.9, whitened=False)
    for G in gradients:
        reference.step(G)
    (weights,), (average,) = trained([start], [gradients])
    torch.testing.assert_close(weights, reference.W, rtol=0, atol=1e-14)
    torch.testing.assert_close(average, reference.average, rtol=0, atol=1e-14)


@pytest.mark.parametrize("empty", [(0,), (0, 3), (3, 0), (2, 0, 3)])
@pytest.mark.parametrize("whiten", [True, "auto", "2d"])
def test_empty_parameter_among_others(empty: tuple[int, ...], whiten: bool | str) -> None:
    """A parameter without entries steps, evaluates and trains, and the others move as without it."""
    start, gradients = draws(1, 4, 4, seed=9)[0], draws(STEPS, 4, 4)
    nothing = torch.empty(empty, dtype=torch.float64)
    (before, weights, after), _ = trained(
        [nothing, start, nothing],
        [nothing.expand(STEPS, *empty), gradients, nothing.expand(STEPS, *empty)],
        whiten=whiten,
    )
    assert same([weights], trained([start], [gradients], whiten=whiten)[0])
    assert before.shape == after.shape == torch.Size(empty)
    parameter = nn.Parameter(nothing.clone())
    SPlus([parameter]).eval().train()
    assert parameter.shape == torch.Size(empty)


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same values in another memory layout."""
    if kind == "transposed":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "column slice":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("of_gradient", [None, "transposed", "column slice", "channels_last"])
@pytest.mark.parametrize("of_weight", [None, "transposed", "column slice", "channels_last"])
@pytest.mark.parametrize("options", [{}, {"whiten": False}, {"split": 2}, {"max_preconditioner_dim": 3}])
def test_memory_layout_does_not_matter(of_weight: str | None, of_gradient: str | None, options: dict[str, Any]) -> None:
    """Weights and gradients of any strides move exactly as contiguous ones, and weights keep their strides."""
    shape = (4, 2, 2, 3) if "channels_last" in (of_weight, of_gradient) else (4, 6)
    start, gradients = draws(1, *shape, seed=9)[0], draws(12, *shape)
    expected_weights, expected_averages = trained([start], [gradients], **options)
    parameter = nn.Parameter(strided(start, of_weight) if of_weight else start.clone())
    before = parameter.stride()
    optimizer = SPlus([parameter], **{**SETTINGS, **options})
    for G in gradients:
        parameter.grad = strided(G, of_gradient) if of_gradient else G
        optimizer.step()
    assert same([parameter.detach()], expected_weights)
    assert parameter.stride() == before
    optimizer.eval()
    assert same([parameter.detach()], expected_averages)
    assert parameter.stride() == before
    optimizer.train()
    assert same([parameter.detach()], expected_weights)
    assert parameter.stride() == before


def test_parameters_without_a_gradient_in_some_steps() -> None:
    """Without a gradient a parameter and its state stay bit for bit; its neighbours in the batch move as alone."""
    shapes = [(4, 4), (4, 4), (4, 4), (3,), (3,)]
    starts = [draws(1, *shape, seed=7 + i)[0] for i, shape in enumerate(shapes)]
    gradients = [draws(STEPS, *shape, seed=i) for i, shape in enumerate(shapes)]
    present = draws(STEPS, len(shapes), seed=42) > 0
    present[8] = False
    together = [nn.Parameter(start.clone()) for start in starts]
    alone = [nn.Parameter(start.clone()) for start in starts]
    optimizer, optimizers = SPlus(together, **SETTINGS), [SPlus([p], **SETTINGS) for p in alone]
    for step in range(STEPS):
        before = [{k: torch.as_tensor(v).clone() for k, v in optimizer.state[p].items()} for p in together]
        weights = [p.detach().clone() for p in together]
        drive(optimizer, together, [[G[step] if has else None for G, has in zip(gradients, present[step])]])
        for i, has in enumerate(present[step]):
            if has:
                drive(optimizers[i], [alone[i]], [[gradients[i][step]]])
            else:
                assert torch.equal(together[i], weights[i])
                assert all(
                    torch.equal(torch.as_tensor(optimizer.state[together[i]][k]), v) for k, v in before[i].items()
                )
    assert same([p.detach() for p in together], [p.detach() for p in alone])
    for p, q, own in zip(together, alone, optimizers):
        ours, theirs = optimizer.state[p], own.state[q]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours)


def test_parameter_without_any_gradient_keeps_its_state_from_the_start() -> None:
    """A frozen parameter has state from the constructor on, stays as it is, and evaluates as itself."""
    frozen, other = nn.Parameter(draws(1, 4, 4)[0], requires_grad=False), nn.Parameter(draws(1, 4, 4)[0])
    before = frozen.detach().clone()
    optimizer = SPlus([frozen, other], **SETTINGS)
    drive(optimizer, [other], draws(5, 1, 4, 4))
    assert torch.equal(frozen, before)
    assert optimizer.state[frozen]["step"] == 0
    optimizer.eval()
    assert torch.equal(frozen, before)


@pytest.mark.parametrize("shape", [(4, 4), (3,)])
def test_tensor_listed_twice_moves_once(shape: tuple[int, ...]) -> None:
    """A tensor given twice warns as every torch optimizer does, and moves as if given once."""
    start, gradients = draws(1, *shape, seed=9)[0], draws(STEPS, *shape)
    twice, neighbour = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = SPlus([twice, neighbour, twice], **SETTINGS)
    drive(optimizer, [twice, neighbour], zip(gradients, gradients))
    expected = trained([start], [gradients])
    assert same([twice.detach()], expected[0])
    assert same([neighbour.detach()], expected[0])
    assert same([optimizer.state[twice]["average"]], expected[1])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A shape and options of matrix_layout that fit it."""
    stacked = draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=4)))
    flat = len(shape) > 2 and not stacked
    split_dim = 0 if flat else draw(st.sampled_from([0, 1]))
    side = shape[split_dim - 2] if stacked else shape[split_dim]
    ends = sorted(draw(st.sets(st.integers(1, side), max_size=3)) | {side})
    sizes = tuple(b - a for a, b in zip([0, *ends], ends))
    split = draw(st.sampled_from([None, sizes, *(count for count in range(1, side + 1) if side % count == 0)]))
    options = {"stacked": stacked, "split": split, "split_dim": split_dim, "max_side": draw(st.integers(1, 10))}
    return shape, options | {"oversized": draw(st.sampled_from(["blocks", "unrotated", "published"]))}


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_layout_covers_every_entry_once(cut: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    """The parts and their places cover every entry once, in the same order, and blocks are within the limit."""
    shape, options = cut
    layout = matrix_layout(shape, **options)
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    written = torch.zeros_like(tensor)
    for index, part in enumerate(layout.parts):
        matrices = layout.split(tensor, index)
        assert matrices.shape == (layout.count(part), part.m, part.n)
        if options["oversized"] == "blocks":
            assert max(part.m, part.n) <= options["max_side"]
        cut_at = len(matrices) // 2
        for chosen in (slice(0, cut_at), slice(cut_at, len(matrices))) if cut_at else (slice(0, 1),):
            places = layout.places(written, index, chosen)
            for place, value in zip(places, layout.fit_places(matrices[chosen], index, chosen), strict=True):
                place.add_(value + 1)
    assert torch.equal(written, tensor + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 5}, "split=5"),
        ({"split": (3, 4)}, r"split=\(3, 4\)"),
        ({"split": (-4, 16)}, r"split=\(-4, 16\)"),
        ({"split": 0}, "split=0"),
        ({"split": 3, "split_dim": 1}, "split=3"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_wrong_split_names_the_parameter(options: dict[str, Any], message: str, named: bool) -> None:
    """Sections that do not fit are a ValueError that says which parameter and what was given."""
    parameter = nn.Parameter(torch.zeros(12, 4))
    name = "parameter 'attention.qkv'" if named else r"parameter 0 of group 0, shape \(12, 4\)"
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        SPlus([("attention.qkv", parameter)] if named else [parameter], **options)


def test_columns_of_a_convolution_cannot_be_split() -> None:
    """Columns that are several dimensions in one have no sections, and the error says what to do."""
    with pytest.raises(ValueError, match=r"parameter 0 .*split=3 with split_dim=1.*stacked=True"):
        SPlus([nn.Parameter(torch.zeros(4, 3, 3))], split=3, split_dim=1)


def test_rejected_group_leaves_the_optimizer_as_it_was() -> None:
    """After a ValueError of add_param_group the optimizer steps on with the groups it had."""
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = SPlus([parameter], **SETTINGS)
    with pytest.raises(ValueError, match="split=3"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 4))], "split": 3})
    assert len(optimizer.param_groups) == 1
    gradients = draws(STEPS, 4, 4)
    drive(optimizer, [parameter], gradients.unsqueeze(1))
    assert same([parameter.detach()], trained([torch.zeros(4, 4, dtype=torch.float64)], [gradients])[0])


@pytest.mark.parametrize("option", [{"split": [2]}, {"split_dim": [0, 1, 1]}, {"stacked": [True]}])
def test_list_of_wrong_length(option: dict[str, Any]) -> None:
    """A list-valued option needs one entry for each parameter of the group."""
    with pytest.raises(ValueError, match=f"{next(iter(option))} is a list of"):
        SPlus([nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))], **option)


def test_lists_give_each_parameter_its_own() -> None:
    """Entries of list-valued options go to the parameters in order."""
    shapes = [(6, 4), (4, 6), (3, 4, 2)]
    lists: dict[str, list[Any]] = {"split": [2, (4, 2), None], "split_dim": [0, 1, 0], "stacked": [False, False, True]}
    starts = [draws(1, *shape, seed=9)[0] for shape in shapes]
    gradients = [draws(STEPS, *shape) for shape in shapes]
    together, _ = trained(starts, gradients, **lists)
    for i, weights in enumerate(together):
        alone, _ = trained([starts[i]], [gradients[i]], **{name: values[i] for name, values in lists.items()})
        assert same([weights], alone)


def test_one_batch_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers, a step computes one direction for each shape, and numbers do not depend on the batch."""
    batches: list[torch.Size] = []

    def counted(M: Tensor, *rest: Any) -> Tensor:
        batches.append(M.shape)
        return whitened_direction(M, *rest)

    monkeypatch.setattr(splus.buckets, "whitened_direction", counted)
    layers = 12
    # Linear (4, 4), fused (12, 4) of three more, up (8, 4) and its bias.
    shapes = [(4, 4), (12, 4), (8, 4), (8,)]
    parameters = [nn.Parameter(torch.zeros(shape)) for _ in range(layers) for shape in shapes]
    optimizer = SPlus(parameters, split=[None, 3, None, None] * layers, whiten=True)
    drive(optimizer, parameters, [[torch.ones_like(p) for p in parameters]])
    assert sorted(batches) == [(layers, 8, 4), (4 * layers, 4, 4)]
