"""Precision: what the state is held in, and that settings for the model do not reach the optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import draws, drive
from torch import Tensor, nn

import splus.phases
from splus import SPlus
from splus.precision import exact_arithmetic

LOW = [torch.bfloat16, torch.float16]
LAYERED_SETTINGS = hasattr(torch.backends.mkldnn, "matmul")  # torch 2.9 and later
layered = pytest.mark.skipif(not LAYERED_SETTINGS, reason="torch before 2.9 has one setting only")


@pytest.mark.parametrize(
    ("dtype", "of_state"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_state_is_single_or_better(dtype: torch.dtype, of_state: torch.dtype) -> None:
    """All state is fp32, or fp64 for fp64 parameters, before and after steps; parameters keep their dtype."""
    parameters = [nn.Parameter(torch.ones(4, 4, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))]
    optimizer = SPlus(parameters)
    for _ in range(2):
        tensors = [v for p in parameters for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        assert {tensor.dtype for tensor in tensors} == {of_state}
        assert {parameter.dtype for parameter in parameters} == {dtype}
        drive(optimizer, parameters, [[torch.ones_like(parameter) for parameter in parameters]] * 3)


def test_one_group_of_many_dtypes() -> None:
    """Parameters of one shape and several dtypes in a group each move as in a group of their own."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.bfloat16]
    gradients = [draws(10, 4, 4, seed=i, dtype=dtype) for i, dtype in enumerate(dtypes)]
    together = [nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in dtypes]
    apart = [nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in dtypes]
    drive(SPlus(together, spread_refreshes=False), together, zip(*gradients))
    for parameter, of_parameter in zip(apart, gradients):
        drive(SPlus([parameter], spread_refreshes=False), [parameter], of_parameter.unsqueeze(1))
    assert all(map(torch.equal, together, apart))


# Low-precision parameters


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_run_is_the_rounded_full_precision_run(dtype: torch.dtype) -> None:
    """Given the same gradients, weights and averages are those of an fp32 run, rounded."""
    shapes = [(4, 4), (6, 3), (5,), ()]
    starts = [draws(1, *shape, seed=i, dtype=dtype)[0] for i, shape in enumerate(shapes)]
    low, full = [nn.Parameter(start.clone()) for start in starts], [nn.Parameter(start.float()) for start in starts]
    of_low, of_full = SPlus(low, ema_decay=0.9), SPlus(full, ema_decay=0.9)
    for of_step in zip(*(draws(50, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))):
        drive(of_low, low, [of_step])
        drive(of_full, full, [[G.float() for G in of_step]])
        assert all(torch.equal(p, q.to(dtype)) for p, q in zip(low, full))
    of_low.eval()
    of_full.eval()
    assert all(torch.equal(p, q.to(dtype)) for p, q in zip(low, full))


@pytest.mark.parametrize("dtype", LOW)
def test_small_decay_is_not_rounded_away(dtype: torch.dtype) -> None:
    """A thousand decays by 1 - 1e-4, each below the spacing of the dtype, shrink weights by a tenth."""
    parameter = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = SPlus([parameter], lr=0.1, weight_decay=1e-4 / (0.1 * 2 / 8))
    drive(optimizer, [parameter], [[torch.zeros(4, 4, dtype=dtype)]] * 1000)
    expected = torch.full((4, 4), (1 - 1e-4) ** 1000)
    torch.testing.assert_close(optimizer.state[parameter]["weights"], expected, rtol=1e-4, atol=0)
    assert torch.equal(parameter, expected.to(dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_small_steps_are_not_rounded_away(dtype: torch.dtype) -> None:
    """A thousand steps of 1e-5, each below the spacing at 1, add up."""
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = SPlus([parameter], lr=1e-2, weight_decay=0.0, elementwise_scale=1e-3, normalization_decay=0.0)
    drive(optimizer, [parameter], [[torch.ones(3, dtype=dtype)]] * 1000)
    weights = optimizer.state[parameter]["weights"]
    torch.testing.assert_close(weights, torch.full((3,), 0.99), rtol=0, atol=2e-5)
    assert torch.equal(parameter, weights.to(dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_weights_changed_from_outside_are_respected(dtype: torch.dtype) -> None:
    """Entries that someone else set are the new weights; the others keep what rounding hides."""
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = SPlus([parameter], lr=1e-2, weight_decay=0.0, elementwise_scale=1e-3, normalization_decay=0.0)
    gradients = [[torch.ones(4, dtype=dtype)]] * 10
    drive(optimizer, [parameter], gradients)
    with torch.no_grad():
        parameter[:2] = 5.0
    drive(optimizer, [parameter], gradients)
    expected = torch.tensor([5 - 10e-5, 5 - 10e-5, 1 - 20e-5, 1 - 20e-5])
    torch.testing.assert_close(optimizer.state[parameter]["weights"], expected, rtol=0, atol=1e-6)
    assert torch.equal(parameter, expected.to(dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_weights_changed_from_outside_survive_the_swap(dtype: torch.dtype) -> None:
    """What is loaded into the model in train mode is there again after an evaluation."""
    parameter = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = SPlus([parameter])
    drive(optimizer, [parameter], draws(5, 1, 4, 4, dtype=dtype))
    with torch.no_grad():
        parameter.fill_(3.0)
    with optimizer.averaged():
        assert not torch.equal(parameter, torch.full((4, 4), 3.0, dtype=dtype))
    assert torch.equal(parameter, torch.full((4, 4), 3.0, dtype=dtype))


# Settings for the model


@pytest.fixture
def restored() -> Iterator[None]:
    """The precision settings are torch's own before and after."""
    yield
    torch.set_float32_matmul_precision("highest")
    if LAYERED_SETTINGS:
        torch.backends.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def bf16_for_one_operator() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def bf16_for_all() -> None:
    torch.backends.fp32_precision = "bf16"


SETTINGS = [medium, pytest.param(bf16_for_one_operator, marks=layered), pytest.param(bf16_for_all, marks=layered)]


def readings() -> dict[str, Any]:
    """Every setting of the precision of matrix products that can be read."""
    backends: list[Any] = [torch.backends, torch.backends.mkldnn, torch.backends.cuda.matmul]
    if LAYERED_SETTINGS:
        backends.append(torch.backends.mkldnn.matmul)
    found = {str(i): getattr(backend, "fp32_precision", None) for i, backend in enumerate(backends)}
    try:
        found["global"] = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to read it once a finer setting disagrees
        found["global"] = None
    return found


def trained() -> list[Tensor]:
    """Weights, averages, factors and bases of matrices large enough for reduced-precision kernels."""
    parameter = nn.Parameter(draws(1, 64, 64, dtype=torch.float32)[0])
    optimizer = SPlus([parameter])
    drive(optimizer, [parameter], draws(4, 1, 64, 64, seed=1, dtype=torch.float32))
    metrics = optimizer.metrics()[0]
    numbers = torch.tensor([metrics["update_rms"], metrics["basis_drift"], metrics["orthogonality_error"]])
    return [parameter.detach(), numbers, *(v for v in optimizer.state[parameter].values() if isinstance(v, Tensor))]


@pytest.mark.parametrize("choose", SETTINGS)
@pytest.mark.usefixtures("restored")
def test_reduced_precision_changes_no_bit(choose: Callable[[], None]) -> None:
    """Whatever precision the user chooses for the model's products, steps and metrics are full fp32."""
    expected = trained()
    choose()
    before = readings()
    assert all(map(torch.equal, trained(), expected))
    assert readings() == before


@pytest.mark.parametrize("choose", SETTINGS)
@pytest.mark.usefixtures("restored")
def test_settings_survive_an_exception(choose: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails halfway leaves the settings and autocast as they were."""
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = SPlus([parameter])

    def failing(*arguments: Any) -> None:
        raise ArithmeticError("halfway")

    monkeypatch.setattr(splus.optimizer, "refresh_bases", failing)
    choose()
    before = readings()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ArithmeticError, match="halfway"):
        drive(optimizer, [parameter], draws(1, 1, 4, 4, dtype=torch.float32))
    assert readings() == before


@layered
@pytest.mark.usefixtures("restored")
def test_inherited_setting_stays_inherited() -> None:
    """An operator that follows torch.backends.fp32_precision still follows it after a step."""
    torch.backends.fp32_precision = "bf16"
    parameter = nn.Parameter(torch.zeros(4, 4))
    drive(SPlus([parameter]), [parameter], draws(1, 1, 4, 4, dtype=torch.float32))
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("restored")
def test_settings_hold_inside_exact_arithmetic_only() -> None:
    """Products are full fp32 inside, and reduced again outside where the processor has such products."""
    a = draws(1, 64, 64, dtype=torch.float32)[0]
    exact = a @ a
    torch.set_float32_matmul_precision("medium")
    reduced = a @ a
    with exact_arithmetic({"cpu"}):
        assert torch.equal(a @ a, exact)
    assert torch.equal(a @ a, reduced)


@pytest.mark.parametrize("dtype", LOW)
def test_step_inside_autocast(dtype: torch.dtype) -> None:
    """A step inside an autocast block is the step outside it, and autocast is on again after it."""
    expected = trained()
    with torch.autocast("cpu", dtype=dtype):
        assert all(map(torch.equal, trained(), expected))
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
