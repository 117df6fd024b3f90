"""Refreshing a basis: when it is due, what the solvers return, and what happens when they fail."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import draws, drive, refresh_steps
from torch import Tensor, nn

import splus.buckets
from splus import PAPER, SPlus
from splus.books import DECOMPOSITION_FAULT_LIMIT
from splus.eigenbasis import basis_drift, orthogonal_iteration, orthogonality_error, refreshed_basis
from splus.matrices import matrix_layout
from splus.plan import refresh_schedule, refresh_turns

DOUBLE = torch.float64


def orthogonal(n: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.linalg.qr(draws(batch, n, n, seed=seed)).Q


def due_steps(
    last: int, period: int, growth: float | None, turn: int = -1, first: int = 1, shortest: int = 1
) -> list[int]:
    schedule = refresh_schedule(period, growth, first, shortest)
    return [step for step in range(1, last + 1) if schedule.due(step, turn % period)]


# When


def test_published_schedule() -> None:
    """Without early refreshes and all at once: at step 1 and at every multiple of the period."""
    assert due_steps(350, 100, None) == [1, 100, 200, 300]
    assert due_steps(4, 1, None) == [1, 2, 3, 4]


def test_default_schedule_is_dense_early() -> None:
    """A first round of 10 steps, rounds of 5, longer ones from step 40 on, and of 10 once they have got to that."""
    optimizer = SPlus([nn.Parameter(torch.zeros(2, 2))])
    schedule, turns = optimizer._books[0].refresh_plan(optimizer.param_groups[0])
    assert turns == {0: 0}
    steps = [step for step in range(1, 100) if schedule.due(step, 0)]
    assert steps == [1, 11, 16, 21, 26, 31, 36, 41, 46, 52, 59, 67, 76, 86, 96]
    assert [step for step in range(1, 12) if schedule.is_first(step)] == list(range(1, 11))


ROUNDS = [(1, 1), (10, 5), (4, 2), (3, 7)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.sampled_from([None, 1.1, 1.3, 1.5, 2.0, 3.0]), st.sampled_from(ROUNDS), st.data())
def test_schedule_is_the_simulated_one(
    period: int, growth: float | None, rounds: tuple[int, int], data: st.DataObject
) -> None:
    """Whether a step is due agrees with rounds laid one after the other, at every turn."""
    turn = data.draw(st.integers(0, period - 1))
    expected = sorted(refresh_steps(400, period, growth, turn, *rounds))
    assert due_steps(400, period, growth, turn, *rounds) == expected


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("period", "growth"), [(10, 1.3), (1, 1.3), (5, 1.1), (100, 1.3), (10, 2.0), (20, None)])
def test_no_basis_gets_older_than_the_period(period: int, growth: float | None, rounds: tuple[int, int]) -> None:
    """At every turn a matrix refreshes at least once in any ``period`` steps, where early rounds end too."""
    for turn in range(period):
        steps = [0, *due_steps(600, period, growth, turn, *rounds)]
        longest = max(after - before for before, after in pairwise(steps))
        assert longest <= period, f"{longest} steps without a refresh at turn {turn}: {steps}"


@pytest.mark.parametrize(("period", "growth"), [(10, 1.3), (100, 1.3), (20, None), (7, 2.0)])
def test_a_step_refreshes_a_fifth_at_most(period: int, growth: float | None) -> None:
    """Spread, the turns that come at one step are a fifth of all, or one more; in the first round a tenth."""
    schedule = refresh_schedule(period, growth, 10, 5)
    for step in range(1, 400):
        together = sum(schedule.due(step, turn) for turn in range(period))
        assert together <= -(-period // (10 if schedule.is_first(step) else 5))


def test_bases_change_on_the_scheduled_steps_and_at_no_other() -> None:
    """The optimizer renews bases at the end of exactly the steps of its schedule, each matrix at its own turn."""
    parameters = [nn.Parameter(draws(1, 4, 4)[0]) for _ in range(6)]
    optimizer = SPlus(parameters, precondition_frequency=6, refresh_growth=2.0)
    turns = refresh_turns({i: matrix_layout((4, 4), max_side=8) for i in range(6)}, 6, True)
    assert sorted(turns.values()) == [0, 1, 2, 3, 4, 5]
    for step, G in enumerate(draws(20, 4, 4), start=1):
        before = [optimizer.state[p]["basis_left"].clone() for p in parameters]
        drive(optimizer, parameters, [[G] * 6])
        for i, parameter in enumerate(parameters):
            changed = not torch.equal(optimizer.state[parameter]["basis_left"], before[i])
            assert changed == (step in refresh_steps(step, 6, 2.0, turns[i], 10, 5))


def test_new_basis_is_first_used_in_the_next_step() -> None:
    """A step is taken in the basis of before it: refreshing at a step leaves that step's weights as they are."""
    start, gradients = draws(1, 4, 4, seed=9)[0], draws(6, 4, 4)
    weights = []
    for period in (6, 100):
        parameter = nn.Parameter(start.clone())
        optimizer = SPlus([parameter], precondition_frequency=period, refresh_growth=None, spread_refreshes=False)
        drive(optimizer, [parameter], gradients.unsqueeze(1))
        weights.append(parameter.detach())
    assert torch.equal(*weights)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=30), st.integers(1, 12))
def test_turns_share_the_work_of_a_period(shapes: list[tuple[int, int]], period: int) -> None:
    """No step of the period carries more than the least loaded one plus the largest single refresh."""
    layouts = {i: matrix_layout(shape, max_side=100) for i, shape in enumerate(shapes)}
    turns = refresh_turns(layouts, period, True)
    work = {i: m**3 + n**3 for i, (m, n) in enumerate(shapes)}
    loads = [sum(work[i] for i, at in turns.items() if at == turn) for turn in range(period)]
    assert turns.keys() == layouts.keys()
    assert sum(loads) == sum(work.values())
    assert max(loads) - min(loads) <= max(work.values())
    assert set(refresh_turns(layouts, period, False).values()) == {period - 1}


# What


def test_orthogonal_iteration_converges_to_the_eigenbasis() -> None:
    """Iterated on one factor it diagonalises it, with the strongest direction first."""
    values = 2.0 ** -torch.arange(8, dtype=DOUBLE)
    V = orthogonal(8, batch=3)
    S, Q = (V * values) @ V.mT, orthogonal(8, seed=1, batch=3)
    first = basis_drift(S, Q)
    for _ in range(60):
        Q = orthogonal_iteration(S, Q)
    assert bool((basis_drift(S, Q) < 1e-12).all())
    assert bool((first > 0.1).all())
    torch.testing.assert_close((Q.mT @ S @ Q).diagonal(dim1=-2, dim2=-1), values.expand(3, 8))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("rank", [0, 1, 3, 8])
def test_orthogonal_iteration_of_a_factor_of_any_rank(rank: int, dtype: torch.dtype) -> None:
    """Directions that a factor has not seen stay orthogonal and do not turn those that it has."""
    n, tolerance = 8, 20 * torch.finfo(dtype).eps
    V = orthogonal(n)
    values = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005], dtype=DOUBLE)
    values[rank:] = 0
    S = ((V * values) @ V.mT).to(dtype)
    # The eigenbasis in the worst order: the unseen directions first, each turned by rounding in S Q.
    Q = V.flip(-1).to(dtype)
    for _ in range(30):
        Q = orthogonal_iteration(S, Q)
        assert orthogonality_error(Q).item() <= tolerance
        assert basis_drift(S, Q).item() <= tolerance


def test_warm_iteration_follows_a_moving_factor() -> None:
    """Gradients of one distribution: refreshed by QR every step, the default's basis stays close to the eigenbasis."""
    parameter = nn.Parameter(torch.zeros(6, 6, dtype=DOUBLE))
    optimizer = SPlus([parameter], betas=(0.9, 0.99), precondition_frequency=1)
    spectrum = torch.logspace(0, -2, 6, dtype=DOUBLE)
    drive(optimizer, [parameter], (draws(300, 6, 6) * spectrum).unsqueeze(1))
    state = optimizer.state[parameter]
    assert basis_drift(state["factor_right"], state["basis_right"]).item() < 0.01
    assert basis_drift(state["factor_right"], torch.eye(6, dtype=DOUBLE)).item() > 0.02


def test_drift_and_orthogonality_error() -> None:
    """Zero for an exact basis and for a zero factor; what the formulas say otherwise; NaN for a basis that has one."""
    S = torch.tensor([[[3.0, 0], [0, 1]], [[2, 1], [1, 2]], [[0, 0], [0, 0]]], dtype=DOUBLE)
    eye = torch.eye(2, dtype=DOUBLE).expand(3, 2, 2)
    torch.testing.assert_close(basis_drift(S, eye), torch.tensor([0, 0.2**0.5, 0], dtype=DOUBLE))
    exact = torch.linalg.eigh(S).eigenvectors
    torch.testing.assert_close(basis_drift(S, exact), torch.zeros(3, dtype=DOUBLE), rtol=0, atol=1e-15)
    Q = torch.stack([torch.eye(2), torch.eye(2) * 2, torch.tensor([[1.0, 0.5], [0, 1]]), torch.full((2, 2), torch.nan)])
    torch.testing.assert_close(orthogonality_error(Q), torch.tensor([0.0, 3, 0.5, torch.nan]), equal_nan=True)


# When it fails

Solver = Callable[[Tensor], Any]


def patch_solvers(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor], only: torch.dtype | None = None
) -> None:
    """Have eigh and qr return ``change(matrix, basis)`` in place of their basis, for one dtype or for all."""

    def of_eigh(S: Tensor, _eigh: Solver = torch.linalg.eigh) -> Any:
        values, vectors = _eigh(S)
        changed = vectors if only not in (None, S.dtype) else change(S, vectors)
        return SimpleNamespace(eigenvalues=values, eigenvectors=changed)

    def of_qr(reflectors: Tensor, scales: Tensor, _make: Any = torch.linalg.householder_product) -> Tensor:
        Q = _make(reflectors, scales)
        return Q if only not in (None, Q.dtype) else change(reflectors, Q)

    monkeypatch.setattr(torch.linalg, "eigh", of_eigh)
    monkeypatch.setattr(torch.linalg, "householder_product", of_qr)


def raising(S: Tensor, basis: Tensor) -> Tensor:
    raise torch.linalg.LinAlgError("the algorithm failed to converge")


def stretched(S: Tensor, basis: Tensor) -> Tensor:
    return basis * 1.01


def undefined(S: Tensor, basis: Tensor) -> Tensor:
    return torch.full_like(basis, torch.nan)


FAILURES = [raising, stretched, undefined]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_failure_in_single_is_decided_in_double(
    monkeypatch: pytest.MonkeyPatch, method: Any, failure: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Where fp32 fails, raises or returns no basis, the fp64 decomposition is used and nothing is reported."""
    G = draws(2, 5, 5)
    S = (G @ G.mT).float()
    Q = torch.eye(5).repeat(2, 1, 1)
    patch_solvers(monkeypatch, failure, only=torch.float32)
    basis, failed = refreshed_basis(S, Q, method)
    assert failed == [False, False]
    assert basis.dtype == torch.float32
    assert torch.equal(basis, torch.linalg.eigh(S.double()).eigenvectors.float())


@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_only_the_failed_matrix_of_a_batch_is_decided_in_double(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    """A bad basis in a batch is replaced; the good ones are those that the solver returned."""
    G = draws(3, 5, 5)
    S = (G @ G.mT).float()
    Q = torch.linalg.eigh(S + 0.1).eigenvectors
    sound, _ = refreshed_basis(S, Q, method)

    def spoil_second(S: Tensor, basis: Tensor) -> Tensor:
        return torch.stack([basis[0], basis[1] * 2, basis[2]])

    patch_solvers(monkeypatch, spoil_second, only=torch.float32)
    basis, failed = refreshed_basis(S, Q, method)
    assert failed == [False] * 3
    assert torch.equal(basis[[0, 2]], sound[[0, 2]])
    assert torch.equal(basis[1], torch.linalg.eigh(S[1].double()).eigenvectors.float())


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("allocator", ["CUDA", "CPU"])
def test_out_of_memory_is_not_a_failed_decomposition(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, allocator: str
) -> None:
    """Running out of memory in the solver, or in the one in fp64 after it, is not hidden behind an old basis."""

    def exhausted(S: Tensor, basis: Tensor) -> Tensor:
        if S.dtype != dtype:
            return basis * 2
        if allocator == "CUDA":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.empty(2**60)

    patch_solvers(monkeypatch, exhausted)
    with pytest.raises(RuntimeError, match="memory"):
        refreshed_basis(torch.eye(3).unsqueeze(0), torch.eye(3).unsqueeze(0), "eigh")


@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_device_without_a_solver(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    """Where torch has no kernel, bases are decomposed in fp64 on the CPU; it is said once and is no fault."""

    def missing(S: Tensor, basis: Tensor) -> Tensor:
        raise NotImplementedError("The operator is not currently implemented for the device.")

    patch_solvers(monkeypatch, missing, only=torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        optimizer, parameter = settled(refresh_method=method)
        drive(optimizer, [parameter], draws(5, 1, 4, 4, dtype=torch.float32))
    assert ["has no solver" in str(warning.message) for warning in said] == [True]
    state = optimizer.state[parameter]
    assert basis_drift(state["factor_left"], state["basis_left"]).item() < 1e-5


@pytest.mark.parametrize("method", ["qr", "eigh"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_factor_that_is_not_finite_keeps_its_basis(bad: float, method: Any) -> None:
    """One NaN or infinity in a factor keeps that matrix's basis bit for bit; the others of the batch refresh."""
    G = draws(3, 5, 5)
    S = (G @ G.mT).float()
    sound, _ = refreshed_basis(S[[0, 2]], torch.eye(5).repeat(2, 1, 1), "eigh")
    S[1, 2, 3] = S[1, 3, 2] = bad
    Q = orthogonal(5, batch=3).float()
    basis, failed = refreshed_basis(S, Q, method)
    assert failed == [False, True, False]
    assert torch.equal(basis[1], Q[1])
    if method == "eigh":
        torch.testing.assert_close(basis[[0, 2]].abs(), sound.abs(), rtol=1e-4, atol=1e-4)
    for good in (0, 2):
        assert basis_drift(S[good], basis[good]) < basis_drift(S[good], Q[good])


def settled(name: str = "layer.weight", **options: Any) -> tuple[SPlus, nn.Parameter]:
    """An optimizer of one named parameter after three steps, which refreshes at every step."""
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = SPlus([(name, parameter)], precondition_frequency=1, **options)
    drive(optimizer, [parameter], draws(3, 1, 4, 4, dtype=torch.float32))
    return optimizer, parameter


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_repeated_failure(
    monkeypatch: pytest.MonkeyPatch, method: str, failure: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """The old basis is kept bit for bit, said once by name; at the limit it is a RuntimeError by name."""
    optimizer, parameter = settled(refresh_method=method)
    state = optimizer.state[parameter]
    before = {side: state[f"basis_{side}"].clone() for side in ("left", "right")}
    patch_solvers(monkeypatch, failure)
    gradients = draws(DECOMPOSITION_FAULT_LIMIT, 1, 4, 4, seed=1, dtype=torch.float32)
    with pytest.warns(UserWarning, match="old eigenbasis of parameter 'layer.weight'") as said:
        drive(optimizer, [parameter], gradients[:-1])
    assert len(said) == 1
    weights = parameter.detach().clone()
    assert all(torch.equal(state[f"basis_{side}"], basis) for side, basis in before.items())
    with pytest.raises(RuntimeError, match=rf"parameter 'layer.weight', {DECOMPOSITION_FAULT_LIMIT} times in a row"):
        drive(optimizer, [parameter], gradients[-1:])
    assert all(torch.equal(state[f"basis_{side}"], basis) for side, basis in before.items())
    assert bool(parameter.isfinite().all())
    assert not torch.equal(parameter, weights)


def test_recovery_resets_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that a success interrupts never reach the limit, and are said once."""
    optimizer, parameter = settled()
    gradients = draws(4 * DECOMPOSITION_FAULT_LIMIT, 1, 4, 4, seed=1, dtype=torch.float32)

    def train() -> None:
        for step, of_step in enumerate(gradients):
            with monkeypatch.context() as patch:
                if step % DECOMPOSITION_FAULT_LIMIT:
                    patch_solvers(patch, raising)
                drive(optimizer, [parameter], [of_step])

    with pytest.warns(UserWarning, match=r"layer\.weight") as said:
        train()
    assert len(said) == 1


def test_failing_parameter_does_not_disturb_its_neighbours() -> None:
    """A factor that overflowed is reported by its name; the other of the batch refreshes and moves as alone."""
    pair, alone = [nn.Parameter(torch.zeros(4, 4)) for _ in range(2)], nn.Parameter(torch.zeros(4, 4))
    together = SPlus(list(zip(["good", "bad"], pair)), precondition_frequency=1)
    single = SPlus([alone], precondition_frequency=1)
    gradients = draws(2, 4, 4, dtype=torch.float32)
    together.state[pair[1]]["factor_left"].fill_(torch.inf)
    with pytest.warns(UserWarning, match="'bad'") as said:
        drive(together, pair, [[G, G] for G in gradients])
    assert len(said) == 1
    drive(single, [alone], [[G] for G in gradients])
    # Not bit for bit: the solver gave up on the whole batch, and the good matrix was decomposed in fp64.
    torch.testing.assert_close(pair[0], alone, rtol=0, atol=1e-5)


def test_failing_matrix_of_a_partial_refresh_is_named() -> None:
    """The right parameter is reported when only some of a batch are due, here the one that has a gradient."""
    pair = [nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    optimizer = SPlus(list(zip(["idle", "bad"], pair)), precondition_frequency=1)
    optimizer.state[pair[1]]["factor_right"].fill_(torch.inf)
    with pytest.warns(UserWarning, match="'bad'"):
        drive(optimizer, pair, [[None, draws(1, 4, 4, dtype=torch.float32)[0]]])


@pytest.mark.parametrize("named", [False, True])
def test_parameters_of_two_groups_fail_apart(named: bool) -> None:
    """A sound parameter of another group, of the same name or place, does not reset the count of a failing one."""
    parameters = [nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    groups = [{"params": [("weight", parameter)] if named else [parameter]} for parameter in parameters]
    optimizer = SPlus(groups, precondition_frequency=1)
    optimizer.state[parameters[0]]["factor_left"].fill_(torch.inf)
    gradients = draws(DECOMPOSITION_FAULT_LIMIT, 4, 4, dtype=torch.float32)
    with (
        pytest.raises(RuntimeError, match="times in a row"),
        pytest.warns(UserWarning, match="old eigenbasis"),
    ):
        drive(optimizer, parameters, [[G, G] for G in gradients])


def test_part_of_a_parameter_is_named() -> None:
    """A failing section of a fused matrix is called by its parameter's name."""
    parameter = nn.Parameter(torch.zeros(7, 4))
    optimizer = SPlus([("qkv", parameter)], split=(4, 3), precondition_frequency=1)
    optimizer.state[parameter]["factor_left.1"].fill_(torch.nan)
    with pytest.warns(UserWarning, match="parameter 'qkv', part 1"):
        drive(optimizer, [parameter], draws(1, 1, 7, 4, dtype=torch.float32))


def test_sound_runs_warn_of_nothing() -> None:
    """Refreshing factors of low rank, zero and full rank says nothing."""
    parameters = [nn.Parameter(torch.zeros(6, 4)) for _ in range(3)]
    optimizer = SPlus(parameters, precondition_frequency=1)
    full = draws(10, 6, 4, dtype=torch.float32)
    low = full[:, :, :1] @ full[:, :1, :]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drive(optimizer, parameters, zip(full, low, torch.zeros_like(full)))
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


# What does not matter


@pytest.mark.parametrize("options", [{}, {**PAPER, "precondition_frequency": 4}], ids=["defaults", "published"])
def test_trajectory_ignores_signs_and_order_of_eigenvectors(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A solver that returns the columns in another order and with other signs leaves the trajectory as it is."""

    def train() -> Tensor:
        parameter = nn.Parameter(torch.zeros(5, 5, dtype=DOUBLE))
        drive(SPlus([parameter], **options), [parameter], draws(40, 1, 5, 5))
        return parameter.detach()

    def shuffled(S: Tensor, basis: Tensor) -> Tensor:
        return basis[..., [3, 0, 4, 1, 2]] * torch.tensor([1.0, -1, -1, 1, -1], dtype=basis.dtype)

    expected = train()
    calls: list[int] = []

    def reordered(S: Tensor, Q: Tensor, method: Any) -> tuple[Tensor, list[bool]]:
        calls.append(len(S))
        basis, failed = refreshed_basis(S, Q, method)
        return shuffled(S, basis), failed

    monkeypatch.setattr(splus.buckets, "refreshed_basis", reordered)
    torch.testing.assert_close(train(), expected, rtol=0, atol=1e-10)
    assert calls
