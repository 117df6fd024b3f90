"""What SPlus.metrics tells of a group, and the learning rate that is converted from Adam's."""

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from reference import draws, drive
from torch import Tensor, nn

from splus import PAPER, SPlus, lr_from_adam

EVERY_STEP_IN_FULL: dict[str, Any] = {"refresh_method": "eigh", "precondition_frequency": 1, "refresh_growth": None}
# Shapes with equal and unequal sides, two of them in one bucket, and a vector.
MATRICES = ((6, 4), (6, 4), (5, 5), (3, 7))
SHAPES = (*MATRICES, (9,))
STEPS = 12


def zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Parameters at 0, whose changes are not rounded off against their sizes."""
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def train(
    optimizer: SPlus, parameters: Sequence[Tensor], steps: int = STEPS, seed: int = 0, start: int = 0
) -> list[Tensor]:
    gradients = [draws(start + steps, *p.shape, seed=seed + i, dtype=p.dtype)[start:] for i, p in enumerate(parameters)]
    drive(optimizer, parameters, zip(*gradients))
    return gradients


def trained(shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> tuple[SPlus, list[nn.Parameter]]:
    parameters = zeros(shapes)
    optimizer = SPlus(parameters, **{"weight_decay": 0.0} | options)
    train(optimizer, parameters)
    return optimizer, parameters


def momentum(optimizer: SPlus, parameter: Tensor) -> Tensor:
    """The momentum in its parameter's shape, put together from its sections and blocks."""
    books, state = optimizer._books[0], optimizer.state[parameter]
    position = next(i for i, p in books.parameters.items() if p is parameter)
    if position not in books.layouts:
        return state["momentum"].clone()
    layout = books.layouts[position]
    whole = torch.empty_like(parameter)
    for index, part in enumerate(layout.parts):
        of_part = state[f"momentum.{index}" if index else "momentum"].reshape(-1, part.m, part.n)
        chosen = slice(0, len(of_part))
        for place, value in zip(layout.places(whole, index, chosen), layout.fit_places(of_part, index, chosen)):
            place.copy_(value)
    return whole


def next_change(optimizer: SPlus, parameters: Sequence[Tensor]) -> Tensor:
    """The change of all entries in a step whose gradient is the momentum, which therefore keeps its direction."""
    before = [parameter.detach().clone() for parameter in parameters]
    sign = -1 if optimizer.param_groups[0]["maximize"] else 1
    drive(optimizer, parameters, [[sign * momentum(optimizer, parameter) for parameter in parameters]])
    return torch.cat([(new.detach() - old).flatten() for old, new in zip(before, parameters)])


def rms(change: Tensor) -> float:
    return float(change.square().mean().sqrt())


# update_rms


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.7, "elementwise_scale": 0.3},
        {"lr": torch.tensor(0.25, dtype=torch.float64)},
        {"whiten": False},
        {"whiten": True, "refresh_method": "eigh"},
        {"max_preconditioner_dim": 3, "whiten": True},
        {"max_preconditioner_dim": 5, "whiten": True, "oversized": "unrotated"},
        {"max_preconditioner_dim": 5, "whiten": True, "oversized": "published"},
        {"eps": 0.2},
        {"maximize": True},
        dict(PAPER),
    ],
    ids=str,
)
def test_update_rms_is_that_of_the_next_update(options: dict[str, Any]) -> None:
    """Predicted from the state, it is what the weights then change by, whatever the settings."""
    optimizer, parameters = trained(**options | {"weight_decay": 0.0})
    predicted = optimizer.metrics()[0]["update_rms"]
    assert predicted > 0
    assert rms(next_change(optimizer, parameters)) == pytest.approx(predicted, rel=1e-9)


def test_update_rms_of_split_and_stacked_parameters() -> None:
    """Sections step by scales of their own, and the root mean square is over all of them."""
    options = {"whiten": True, "split": [(4, 2), 2, None], "split_dim": [0, 1, 0], "stacked": [False, False, True]}
    optimizer, parameters = trained(((6, 4), (3, 8), (2, 3, 4)), **options)
    predicted = optimizer.metrics()[0]["update_rms"]
    assert rms(next_change(optimizer, parameters)) == pytest.approx(predicted, rel=1e-9)


def test_update_rms_of_one_whitened_matrix_is_its_scale() -> None:
    """‖U‖_F = √(mn), so it is lr · 2/(m+n), exactly what the paper's scale says."""
    optimizer, _ = trained(((6, 4),), lr=0.3, step_norm="frobenius")
    assert optimizer.metrics()[0]["update_rms"] == pytest.approx(0.3 * 2 / (6 + 4), rel=1e-12)


@pytest.mark.parametrize("low", [False, True])
def test_update_rms_of_the_elementwise_rule(low: bool) -> None:
    """Every entry moves by lr · elementwise_scale, in a bf16 group as well."""
    parameters = zeros([(9,), (4, 3)], torch.bfloat16 if low else torch.float64)
    optimizer = SPlus(parameters, lr=0.3, elementwise_scale=0.05, whiten=False, normalization_decay=0.0)
    train(optimizer, parameters)
    assert optimizer.metrics()[0]["update_rms"] == pytest.approx(0.3 * 0.05, rel=1e-12)


def test_entries_that_do_not_move_count_in_update_rms() -> None:
    """Half the entries of a vector without gradients make its mean square half."""
    parameter = zeros([(8,)])[0]
    optimizer = SPlus([parameter], lr=0.3, elementwise_scale=0.05)
    parameter.grad = torch.tensor([1.0, -1.0, 2.0, -2.0, 0, 0, 0, 0], dtype=torch.float64)
    optimizer.step()
    assert optimizer.metrics()[0]["update_rms"] == pytest.approx(0.3 * 0.05 / math.sqrt(2), rel=1e-12)


def test_update_rms_follows_the_learning_rate() -> None:
    """It is that of the lr at hand, as a scheduler has just set it."""
    optimizer, parameters = trained(lr=0.1)
    first = optimizer.metrics()[0]["update_rms"]
    optimizer.param_groups[0]["lr"] = 0.4
    assert optimizer.metrics()[0]["update_rms"] == pytest.approx(4 * first, rel=1e-12)
    assert rms(next_change(optimizer, parameters)) == pytest.approx(4 * first, rel=1e-9)


def test_before_the_first_step_there_is_nothing_to_tell() -> None:
    """No momentum, no factors, no refresh: all zero and no division by zero."""
    parameters = zeros(SHAPES)
    nothing = {"update_rms": 0, "basis_drift": 0, "orthogonality_error": 0, "refreshes": 0, "refresh_seconds": 0}
    assert SPlus(parameters).metrics() == [nothing]
    assert SPlus([nn.Parameter(torch.empty(0))]).metrics() == [nothing]


# Bases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drift_is_zero_right_after_a_full_refresh(dtype: torch.dtype) -> None:
    """A basis that was just decomposed diagonalises its factor."""
    parameters = zeros(SHAPES, dtype)
    optimizer = SPlus(parameters, **EVERY_STEP_IN_FULL)
    train(optimizer, parameters)
    assert optimizer.metrics()[0]["basis_drift"] < 1e-5


def test_drift_grows_until_the_next_refresh() -> None:
    """Zero after the refreshes of steps 1 and 5, above it in between, when factors move and bases do not."""
    parameters = zeros(MATRICES)
    optimizer = SPlus(parameters, **EVERY_STEP_IN_FULL | {"precondition_frequency": 5}, spread_refreshes=False)
    drifts = []
    for step in range(9):
        train(optimizer, parameters, 1, start=step)
        drifts.append(optimizer.metrics()[0]["basis_drift"])
    assert [drift < 1e-5 for drift in drifts] == [step in (1, 5) for step in range(1, 10)]
    assert min(drifts[1:4] + drifts[5:]) > 0.01
    assert max(drifts) <= 1


def test_drift_is_that_of_the_worst_factor() -> None:
    """‖offdiag(QᵀSQ)‖ / ‖QᵀSQ‖ of each factor by hand; one that has drifted shows among others that have not."""
    optimizer, parameters = trained(**EVERY_STEP_IN_FULL)
    state = optimizer.state[parameters[1]]
    state["basis_right"].copy_(torch.eye(4, dtype=torch.float64))
    R = state["factor_right"]
    by_hand = (R - R.diag().diag()).norm() / R.norm()
    assert optimizer.metrics()[0]["basis_drift"] == pytest.approx(float(by_hand), rel=1e-12)


def test_drift_of_a_warm_started_basis_is_small() -> None:
    """Orthogonal iterations leave some drift, less than a basis that is never renewed."""
    drifts = [
        trained(**options, spread_refreshes=False)[0].metrics()[0]["basis_drift"]
        for options in ({"precondition_frequency": 1}, {"precondition_frequency": 1000, "refresh_growth": None})
    ]
    assert 1e-5 < drifts[0] < drifts[1]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_bases_stay_orthogonal(method: str, dtype: torch.dtype, limit: float) -> None:
    """max |QᵀQ - I| is rounding, and not exactly zero once a basis was decomposed."""
    parameters = zeros(SHAPES, dtype)
    optimizer = SPlus(parameters, refresh_method=method, precondition_frequency=1)
    train(optimizer, parameters)
    assert 0 < optimizer.metrics()[0]["orthogonality_error"] < limit


def test_orthogonality_error_is_the_largest_of_all_bases() -> None:
    """A basis that is off by a factor of 1.5 in one column shows as 1.5² - 1."""
    optimizer, parameters = trained(**EVERY_STEP_IN_FULL)
    optimizer.state[parameters[3]]["basis_left"][:, 0] *= 1.5
    assert optimizer.metrics()[0]["orthogonality_error"] == pytest.approx(1.25, abs=1e-12)


# Refreshes


def test_refreshes_count_matrices() -> None:
    """Steps 1, 4 and 8 of eight refresh every matrix; a split parameter is as many as its sections, a vector none."""
    parameters = zeros(((6, 4), (5, 5), (9,)))
    options = {"refresh_growth": None, "precondition_frequency": 4, "spread_refreshes": False}
    optimizer = SPlus(parameters, split=[3, None, None], **options)
    counts = []
    for step in range(8):
        train(optimizer, parameters, 1, start=step)
        counts.append(optimizer.metrics()[0]["refreshes"])
    assert counts == [4, 4, 4, 8, 8, 8, 8, 12]


def test_refresh_seconds_add_up() -> None:
    """They grow with every refresh, and are less than the time that has passed."""
    parameters = zeros([(64, 64)])
    optimizer = SPlus(parameters, **EVERY_STEP_IN_FULL)
    seconds = [0.0]
    started = time.perf_counter()
    for step in range(3):
        train(optimizer, parameters, 1, start=step)
        seconds.append(optimizer.metrics()[0]["refresh_seconds"])
    assert seconds == sorted(set(seconds))
    assert seconds[-1] < time.perf_counter() - started


def test_groups_count_apart() -> None:
    """A group without matrices has no refresh; numbers of one group do not leak into another."""
    matrices, vectors = zeros(MATRICES), zeros([(9,), (4, 3)])
    optimizer = SPlus(
        [{"params": matrices, "lr": 0.3}, {"params": vectors, "whiten": False, "lr": 0.2, "elementwise_scale": 0.1}],
        **EVERY_STEP_IN_FULL,
        step_norm="frobenius",
        normalization_decay=0.0,
    )
    train(optimizer, [*matrices, *vectors])
    of_matrices, of_vectors = optimizer.metrics()
    assert (of_matrices["refreshes"], of_vectors["refreshes"]) == (STEPS * len(MATRICES), 0)
    assert of_vectors["update_rms"] == pytest.approx(0.2 * 0.1, rel=1e-12)
    assert of_vectors["basis_drift"] == of_vectors["orthogonality_error"] == 0
    assert of_matrices["update_rms"] == pytest.approx(expected_rms(0.3), rel=1e-9)


def expected_rms(lr: float) -> float:
    """Of the matrices, all of whose rotated entries are ±1."""
    squares = sum(m * n * (lr * 2 / (m + n)) ** 2 for m, n in MATRICES)
    return math.sqrt(squares / sum(m * n for m, n in MATRICES))


# Asking


def test_name_of_the_group() -> None:
    """A group that has a name tells it, one that has none has no such key."""
    a, b = zeros([(3, 4), (5,)])
    optimizer = SPlus([{"params": [a], "name": "matrices"}, {"params": [b]}])
    named, nameless = optimizer.metrics()
    assert named["name"] == "matrices"
    assert set(named) - set(nameless) == {"name"}
    numbers = {"update_rms", "basis_drift", "orthogonality_error", "refreshes", "refresh_seconds"}
    assert set(nameless) == numbers


def test_numbers_are_plain() -> None:
    """Floats and integers, which any logger takes, also when lr is a tensor."""
    optimizer, _ = trained(lr=torch.tensor(0.1))
    kinds = {key: type(value) for key, value in optimizer.metrics()[0].items()}
    assert kinds.pop("refreshes") is int
    assert set(kinds.values()) == {float}


@pytest.mark.parametrize("training", [True, False])
def test_asking_changes_no_bit(training: bool) -> None:
    """State, weights, gradients and settings are those of before, and so is the next step; asking twice is the same."""
    optimizer, parameters = trained(weight_decay=0.1)
    optimizer.train(training)
    before = deepcopy(optimizer.state_dict())
    weights = [
        (parameter.detach().clone(), parameter.grad.clone()) for parameter in parameters if parameter.grad is not None
    ]
    assert optimizer.metrics() == optimizer.metrics()
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert len(weights) == len(parameters)
    for parameter, (weight, gradient) in zip(parameters, weights):
        assert torch.equal(parameter, weight)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_a_run_that_is_asked_is_the_run_that_is_not() -> None:
    """Asking after each step leaves the whole trajectory bit for bit."""
    runs = []
    for asked in (False, True):
        parameters = zeros(SHAPES, torch.float32)
        optimizer = SPlus(parameters)
        for step in range(STEPS):
            train(optimizer, parameters, 1, start=step)
            if asked:
                optimizer.metrics()
        runs.append([parameter.detach() for parameter in parameters])
    assert all(map(torch.equal, *runs))


def test_asking_needs_no_gradients() -> None:
    """After zero_grad, inside no_grad or outside, nothing is tracked."""
    optimizer, _ = trained()
    told = optimizer.metrics()
    optimizer.zero_grad()
    with torch.no_grad():
        assert optimizer.metrics() == told


def test_the_mode_does_not_matter() -> None:
    """What the next update looks like is the same while the averages are in the model."""
    optimizer, _ = trained()
    told = optimizer.metrics()
    with optimizer.averaged():
        assert optimizer.metrics() == told


def test_counts_are_of_the_work_done_here() -> None:
    """A loaded or copied optimizer counts refreshes from zero; of its state it tells what the original tells."""
    optimizer, _ = trained()
    restored = SPlus(zeros(SHAPES))
    restored.load_state_dict(optimizer.state_dict())
    told = optimizer.metrics()[0]
    assert told["refreshes"] > 0
    for fresh in (restored, deepcopy(optimizer)):
        assert fresh.metrics() == [told | {"refreshes": 0, "refresh_seconds": 0}]


# A learning rate from Adam's


@pytest.mark.parametrize(
    ("adam_lr", "hidden_size", "lr"), [(1e-3, 512, 0.568), (1e-3, 1000, 0.71), (1.0, 1, 0.71), (1e-3, 64, 0.284)]
)
def test_lr_from_adam(adam_lr: float, hidden_size: int, lr: float) -> None:
    """0.71 · the cube root of adam_lr · hidden_size."""
    assert lr_from_adam(adam_lr, hidden_size) == pytest.approx(lr, rel=1e-12)
    assert isinstance(lr_from_adam(adam_lr, hidden_size), float)


@pytest.mark.parametrize("adam_lr", [0.0, -1e-3, math.nan])
def test_learning_rate_of_adam_must_be_positive(adam_lr: float) -> None:
    """The error names the value that was given."""
    with pytest.raises(ValueError, match=f"adam_lr={adam_lr} is given.*positive"):
        lr_from_adam(adam_lr, 512)


@pytest.mark.parametrize("hidden_size", [0, -512])
def test_hidden_size_must_be_positive(hidden_size: int) -> None:
    """The error names the value that was given."""
    with pytest.raises(ValueError, match=f"hidden_size={hidden_size} is given.*width"):
        lr_from_adam(1e-3, hidden_size)


def test_empty_rows_have_no_update() -> None:
    """A parameter whose rows are empty counts for nothing, also where steps are divided by a power of their length."""
    empty, weight = nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.ones(2, 3))
    both, alone = (SPlus(ps, whiten=False, width_power=1.0) for ps in ([empty, weight], [weight]))
    for optimizer in (both, alone):
        optimizer.state[weight]["momentum"].fill_(1.0)
    assert both.metrics()[0]["update_rms"] == alone.metrics()[0]["update_rms"] > 0
