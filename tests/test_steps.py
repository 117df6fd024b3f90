"""How a step is computed changes nothing: batches of any size, scratch memory, halves of factors, precision, sides."""

import copy
import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from reference import Reference, draws, drive
from torch import Tensor, nn

import splus.batches
import splus.plan
import splus.update
from splus import SPlus
from splus.matrices import matrix_layout
from splus.plan import plan_buckets
from splus.update import accumulate_factors, whitened_direction
from splus.workspace import Workspace

DOUBLE = torch.float64
# Linear, fused, long enough to be cut into blocks, a convolution, stacked experts, embedding-like, vector, scalar.
SHAPES = [(4, 4), (12, 4), (4, 11), (6, 2, 3, 3), (4, 4), (5, 4, 3), (40, 3), (7,), ()]
OPTIONS: dict[str, list[Any]] = {
    "split": [None, 3, *[None] * 7],
    "stacked": [*[False] * 5, True, False, False, False],
}


def trained(memory_format: torch.memory_format = torch.contiguous_format, **options: Any) -> list[Tensor]:
    """Weights, averages and factors after 15 steps of a model with parameters of every kind, not all with gradients."""
    parameters = [nn.Parameter(draws(1, *shape, seed=i)[0]) for i, shape in enumerate(SHAPES)]
    parameters[3].data = parameters[3].data.contiguous(memory_format=memory_format)
    settings: dict[str, Any] = {"max_preconditioner_dim": 5, "weight_decay": 2.0, "lr": 0.3, "ema_decay": 0.9}
    groups: list[dict[str, Any]] = [
        {"params": parameters[:6], **{name: values[:6] for name, values in OPTIONS.items()}, "whiten": True},
        {"params": parameters[6:], "whiten": False},
    ]
    optimizer = SPlus(groups, **settings, **options)
    gradients = zip(*(draws(15, *shape, seed=10 + i) for i, shape in enumerate(SHAPES)))
    drive(optimizer, parameters, (without(of_step, step) for step, of_step in enumerate(gradients)))
    factors = [value for p in parameters for key, value in optimizer.state[p].items() if "factor" in key]
    return [p.detach() for p in parameters] + [optimizer.state[p]["average"] for p in parameters] + factors


def without(gradients: Iterable[Tensor], step: int) -> list[Tensor | None]:
    """One parameter has no gradient in each step, another one every time."""
    return [None if step % len(SHAPES) == i else gradient for i, gradient in enumerate(gradients)]


@pytest.mark.parametrize("limit", [1, 7, 16, 33, 100])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_size_of_batches_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, limit: int, memory_format: torch.memory_format
) -> None:
    """However many matrices, rows or parameters are stepped together, every number is the same to rounding."""
    expected = trained()
    for module in (splus.plan, splus.batches):
        monkeypatch.setattr(module, "BATCH_LIMIT", limit)
    torch.testing.assert_close(trained(memory_format), expected, rtol=0, atol=1e-12)


def test_runs_cover_the_slots_in_order_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are neighbours in the bucket, hold every matrix of the chosen slots once, and no more than the limit."""
    monkeypatch.setattr(splus.plan, "BATCH_LIMIT", 3 * 6)
    layouts = {
        i: matrix_layout(shape, stacked=True, max_side=9) for i, shape in enumerate([(4, 2, 3), (2, 3), (5, 2, 3)])
    }
    cpu = dict.fromkeys(layouts, torch.device("cpu"))
    (plan,) = plan_buckets(layouts, dict.fromkeys(layouts, DOUBLE), cpu, teams={}, owned={})
    for chosen in ([0], [1], [0, 1], [0, 2], [0, 1, 2]):
        slots = [slot for slot in plan.slots if slot.parameter in chosen]
        runs = plan.runs(slots)
        pieces = [(piece.begin, piece.end) for run in runs for piece in run]
        assert [i for begin, end in pieces for i in range(begin, end)] == [i for slot in slots for i in slot.matrices]
        for run in runs:
            assert run[-1].end - run[0].begin == sum(piece.end - piece.begin for piece in run) <= 3


@pytest.mark.parametrize("shape", [(9, 9), (10, 3), (3, 13)])
def test_half_of_a_factor_is_all_of_it(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """A factor of which one half is computed is symmetric to the bit, the product to rounding; so is a whole run."""
    m, n = shape
    G, L, R = draws(2, m, n), draws(2, m, m, seed=1), draws(2, n, n, seed=2)
    L, R = L + L.mT, R + R.mT
    expected = [0.9 * L + 0.1 * G @ G.mT, 0.9 * R + 0.1 * G.mT @ G]
    monkeypatch.setattr(splus.update, "MIRRORED_FROM", 5)
    accumulate_factors(G, L, R, 0.9)
    torch.testing.assert_close([L, R], expected, rtol=0, atol=1e-14)
    assert torch.equal(L, L.mT)
    assert torch.equal(R, R.mT)
    parameter = nn.Parameter(draws(1, m, m, seed=5)[0])
    optimizer, reference = SPlus([parameter]), Reference(parameter)
    for G in draws(30, m, m):
        drive(optimizer, [parameter], [[G]])
        reference.step(G)
    torch.testing.assert_close(parameter.detach(), reference.W, rtol=0, atol=1e-10)


def test_scratch_memory_holds_nothing_over() -> None:
    """What is in the scratch tensors before a direction is computed does not show; the momentum is only read."""
    M, Q_L, Q_R = draws(3, 4, 5), torch.linalg.qr(draws(3, 4, 4)).Q, torch.linalg.qr(draws(3, 5, 5)).Q
    before = M.clone()
    for left, right in ((Q_L, Q_R), (Q_L, None), (None, Q_R), (None, None)):
        scratch = (torch.full_like(M, torch.nan), torch.full_like(M, torch.nan))
        U = whitened_direction(M, left, right, 1e-9, scratch)
        assert U is scratch[0] or U is scratch[1]
        assert torch.equal(U, whitened_direction(M, left, right, 1e-9))
        assert torch.equal(M, before)


def test_workspace_grows_to_the_largest_request() -> None:
    """Both tensors of a request are apart; later requests, of any dtype, use the same memory."""
    workspace, cpu = Workspace(), torch.device("cpu")
    large = workspace.pair((3, 4), torch.float64, cpu)
    small = workspace.pair((2, 5), torch.bfloat16, cpu)
    assert [t.data_ptr() for t in small] == [t.data_ptr() for t in large]
    large[0].fill_(1)
    large[1].fill_(2)
    assert bool((large[0] == 1).all())
    assert workspace.pair((100,), torch.float32, cpu)[0].shape == (100,)


def allocations(optimizer: SPlus) -> list[int]:
    """Sizes in bytes of what a step allocates."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        optimizer.step()
    events = profile.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("side", [32, 40])
def test_a_step_makes_no_temporary_as_large_as_a_matrix(layers: int, side: int) -> None:
    """Between refreshes, once its scratch memory is there, a step allocates numbers and a vector a matrix only."""
    shapes = [(side, side), (2 * side, side), (4 * side,)] * layers
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = SPlus(parameters, precondition_frequency=1000, refresh_growth=None, spread_refreshes=False)
    for i, parameter in enumerate(parameters):
        parameter.grad = draws(1, *parameter.shape, seed=i, dtype=torch.float32)[0]
    optimizer.step()
    assert max(allocations(optimizer)) <= layers * 2 * side * 4


def test_copies_and_files_leave_the_scratch_memory_out() -> None:
    """A copied optimizer has scratch memory of its own, and a state dict none."""
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = SPlus([parameter])
    drive(optimizer, [parameter], [[torch.ones(4, 4)]])
    twin = copy.deepcopy(optimizer)
    assert twin._workspace is not optimizer._workspace
    assert "workspace" not in str(optimizer.state_dict())


# Low-precision products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_products_turn_the_direction_a_little(dtype: torch.dtype) -> None:
    """Rotating in bf16 flips the signs of the smallest entries: the direction is within 10% of the exact one."""
    M, Q_L, Q_R = (
        draws(4, 48, 32), torch.linalg.qr(draws(4, 48, 48)).Q, torch.linalg.qr(draws(4, 32, 32)).Q,
    )  # fmt: skip
    exact = whitened_direction(M, Q_L, Q_R, 0.0)
    low = whitened_direction(M.float(), Q_L.to(dtype), Q_R.to(dtype), 0.0)
    assert low.dtype == dtype
    error = torch.linalg.matrix_norm(low.double() - exact) / torch.linalg.matrix_norm(exact)
    assert 0 < error.max() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_matmul_dtype_is_that_of_the_bases_alone(dtype: torch.dtype) -> None:
    """Bases and what is seen in them are kept in it; momentum, factors and averages are not: those stay fp32."""
    parameter = nn.Parameter(draws(1, 8, 6, dtype=torch.float32)[0])
    optimizer = SPlus([parameter], matmul_dtype=dtype, precondition_frequency=2)
    drive(optimizer, [parameter], draws(30, 8, 6, dtype=torch.float32).unsqueeze(1))
    kinds = {name: value.dtype for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
    assert {name for name, kind in kinds.items() if kind == dtype} == {"basis_left", "basis_right", "recent_norm"}
    assert set(kinds.values()) == {dtype, torch.float32}
    assert optimizer.metrics()[0]["orthogonality_error"] < 0.02
    assert optimizer.metrics()[0]["basis_drift"] < 0.5


def test_loss_goes_down_with_low_precision_products() -> None:
    """A regression is learnt as with fp32 products, to a tenth."""
    final = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model, inputs = nn.Linear(16, 8), torch.randn(64, 16)
        optimizer = SPlus(model.parameters(), lr=1.0, matmul_dtype=dtype, ema_decay=0.9)
        targets = inputs @ torch.randn(16, 8)
        for _ in range(150):
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.averaged():
            final.append(float((model(inputs) - targets).square().mean()))
    assert final[0] < 0.1 * float(targets.square().mean())
    assert final[1] == pytest.approx(final[0], rel=0.1, abs=1e-3)


@pytest.mark.parametrize("saved", [None, torch.bfloat16])
@pytest.mark.parametrize("live", [None, torch.bfloat16])
def test_bases_keep_their_dtype_through_a_file(saved: torch.dtype | None, live: torch.dtype | None) -> None:
    """A state dict of either precision loads into either; the optimizer at hand keeps its own."""
    start, gradients = draws(1, 6, 4, dtype=torch.float32)[0], draws(24, 6, 4, dtype=torch.float32)
    first, second = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    source, target = SPlus([first], matmul_dtype=saved), SPlus([second], matmul_dtype=live)
    drive(source, [first], gradients[:12].unsqueeze(1))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    second.data.copy_(first.data)
    assert target.state[second]["basis_left"].dtype == (live or torch.float32)
    assert target.param_groups[0]["matmul_dtype"] == live
    drive(source, [first], gradients[12:].unsqueeze(1))
    drive(target, [second], gradients[12:].unsqueeze(1))
    assert torch.equal(first, second) == (saved == live)


# The lean mode


@pytest.mark.parametrize(("shape", "left"), [((4, 7), True), ((7, 4), False), ((5, 5), True)])
def test_shorter_side_follows_the_reference(shape: tuple[int, int], left: bool) -> None:
    """One side has a factor and a basis, the shorter one, of a square the rows; the step is that of the slow rule."""
    parameter = nn.Parameter(draws(1, *shape, seed=5)[0])
    optimizer = SPlus([parameter], sides="shorter")
    reference = Reference(parameter, left=left, right=not left)
    state = optimizer.state[parameter]
    assert ("factor_left" in state, "factor_right" in state) == (left, not left)
    for G in draws(40, *shape):
        drive(optimizer, [parameter], [[G]])
        reference.step(G)
        torch.testing.assert_close(parameter.detach(), reference.W, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("shape", "both"), [((2, 200), True), ((2, 201), False), ((301, 3), False), ((1, 50), False)])
def test_the_side_of_a_stretched_matrix_is_left_unrotated(shape: tuple[int, int], both: bool) -> None:
    """More than 100 times the other, unless it is asked for; what is left is the lean mode."""
    auto, lean, full = (
        SPlus([nn.Parameter(torch.zeros(shape))], sides=sides, whiten=min(shape) > 1)
        for sides in ("auto", "shorter", "both")
    )

    def entries(optimizer: SPlus) -> set[str]:
        return set(optimizer.state[optimizer.param_groups[0]["params"][0]])

    assert entries(auto) == entries(full if both else lean)
    assert (entries(full) == entries(lean)) == (min(shape) == 1)


def test_state_of_the_lean_mode_is_small() -> None:
    """Of a Transformer's block the state takes 16 bytes a parameter, 13 with bases in bf16, and a vector a matrix."""
    width = 64
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    entries = 12 * width**2
    vectors = sum(columns for _, columns in shapes) * 4
    for dtype, most in ((None, 16), (torch.bfloat16, 13)):
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = SPlus(parameters, sides="shorter", matmul_dtype=dtype)
        tensors = [v for p in parameters for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        assert sum(tensor.nbytes for tensor in tensors) <= most * entries + vectors


# Compilation


def test_compiled_step_is_the_step() -> None:
    """torch.compile(optimizer.step) compiles nothing, however lr, betas and step change, and gives the same bits."""
    twins = [[nn.Parameter(draws(1, *shape, seed=9)[0]) for shape in ((6, 4), (5,))] for _ in "ab"]
    optimizers = [SPlus(parameters, precondition_frequency=3) for parameters in twins]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(optimizers[0].step)
    for step in range(12):
        gradients = [draws(12, *parameter.shape)[step] for parameter in twins[0]]
        for parameters, take, scheduler, optimizer in zip(
            twins, (compiled, optimizers[1].step), schedulers, optimizers
        ):
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone()
            take()
            scheduler.step()
            optimizer.param_groups[0]["betas"] = (0.9 - step / 100, 0.97)
    assert all(map(torch.equal, *twins))
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == 0
