"""The programs that measure steps and refreshes: what they compare is what they say, and they run to the end."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import draws
from torch import Tensor

import benchmarks.step_time
from benchmarks import refresh
from benchmarks.contenders import CONTENDERS, SETS, Contender, Floor, ParameterSet, Run
from splus import SPlus
from splus.update import accumulate_factors, rotate, rotate_back

TINY = ParameterSet([(6, 6), (6, 6), (12, 6)], [(20, 6), (6,)])


def gradients_of(parameters: ParameterSet, count: int = 3) -> list[list[Tensor]]:
    shapes = (*parameters.matrices, *parameters.others)
    return [[draws(1, *s, seed=i, dtype=torch.float32)[0] for s in shapes] for i in range(count)]


def run(contender: Contender, steps: int) -> Run:
    running = Run(contender, TINY, gradients_of(TINY))
    for _ in range(steps):
        running.prepare()
        running.step()
    return running


def bases(running: Run) -> list[Tensor]:
    """Every eigenbasis in the state, under the name that its package has for it."""
    state = [value for optimizer in running.optimizers for value in optimizer.state.values()]
    found: list[Any] = []
    for of in state:
        found += [value for key, value in of.items() if key.startswith("basis")]
        found += [value for value in [*of.get("q_sides", []), *(of.get("Q") or [])] if isinstance(value, Tensor)]
    return [value.clone() for value in found]


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_every_contender_trains_what_it_is_given(contender: Contender) -> None:
    """All parameters move; only the matrices are whitened, and both sides of each unless the name says otherwise."""
    running = run(contender, 4)
    untouched = Run(contender, TINY, gradients_of(TINY))
    for parameter, start in zip(running.parameters, untouched.parameters, strict=True):
        assert not torch.equal(parameter, start)
    if contender.period:
        sides = [6] * 3 if "shorter" in contender.name else [6] * 5 + [12]
        assert sorted(len(basis) for basis in bases(running)) == sides


@pytest.mark.parametrize("contender", [c for c in CONTENDERS if c.period], ids=lambda contender: contender.name)
def test_refreshes_come_once_a_period_and_can_be_suspended(contender: Contender) -> None:
    """Ten steps renew every basis once; none while refreshes are suspended, and all again afterwards."""
    running = run(contender, 25)
    running.settle()

    def renewed(steps: int) -> list[int]:
        counts = [0] * len(bases(running))
        for _ in range(steps):
            before = bases(running)
            running.prepare()
            running.step()
            counts = [n + (not torch.equal(a, b)) for n, a, b in zip(counts, before, bases(running))]
        return counts

    options = running.set_options(contender.without)
    assert set(renewed(11)) == {0}
    running.set_options(options)
    assert set(renewed(10)) == {1}


def test_floor_is_the_six_products_of_the_rule() -> None:
    """For every matrix: two factors, two products there and two back, on the rule's shapes."""
    floor = Floor(TINY, torch.device("cpu"))
    assert sorted(tuple(G.shape) for G, *_ in floor.batches) == [(1, 12, 6), (2, 6, 6)]
    expected = []
    for G, _, _, L, R, Q_L, Q_R in floor.batches:
        L, R = L.clone(), R.clone()
        accumulate_factors(G, L, R, 0.97)
        expected.append([L, R, rotate_back(rotate(G, Q_L, Q_R), Q_L, Q_R)])
    floor.step()
    for (_, X, Y, L, R, _, _), (left, right, product) in zip(floor.batches, expected):
        torch.testing.assert_close([L, R], [left, right])
        assert X.shape == Y.shape == product.shape


def test_parameter_sets_are_the_models_they_name() -> None:
    """The numbers of parameters are those of the models: GPT-2 small 124 M, ResNet-18 11.69 M."""
    assert SETS["gpt2"]().entries == pytest.approx(124.4e6, rel=0.001)
    assert SETS["conv"]().entries == 11_689_512
    assert SETS["large"]().entries == 6 * 12 * 384**2 + 13 * 384


def test_program_writes_every_contender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row for the floor and for each optimizer, with times, state and temporaries."""
    monkeypatch.setitem(benchmarks.step_time.SETS, "tiny", lambda: TINY)
    arguments = ["--sets", "tiny", "--early", "3", "--rounds", "2", "--periods", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["step_time", *arguments])
    benchmarks.step_time.main()
    with open(tmp_path / "step_time.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer"] for row in rows[1:]] == [contender.name for contender in CONTENDERS]
    for row in rows[1:]:
        assert all(float(row[column]) > 0 for column in ("first", "step", "mean", "slowest", "state"))
        assert float(row["slowest"]) >= float(row["step"])
    assert (tmp_path / "step_time.png").stat().st_size > 0
    state = {row["optimizer"]: float(row["state"]) for row in rows[1:]}
    assert state["torch AdamW, fused"] == pytest.approx(8, rel=0.1)
    assert state["SPlus, shorter sides, bf16 products"] < state["SPlus, bf16 products"] < state["SPlus"]


def test_temporaries_do_not_grow_with_layers() -> None:
    """Ten layers of 64×64 hold as much scratch memory as BATCH_LIMIT or their gradients, twice, and little more."""
    contender = CONTENDERS[0]
    few, many = (ParameterSet([(64, 64)] * layers) for layers in (1, 10))
    peaks = [benchmarks.step_time.peak_temporaries(contender, of, gradients_of(of)) for of in (few, many)]
    for peak, of in zip(peaks, (few, many)):
        scratch = 2 * of.entries * 4
        assert scratch <= peak <= scratch + 12 * 64 * 64 * 4


def test_refresh_program_compares_every_method(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On real factors a full decomposition leaves no drift, an iteration less than there was, both orthogonal."""
    monkeypatch.setattr(sys, "argv", ["refresh", "--widths", "32", "--rounds", "1", "--output", str(tmp_path)])
    refresh.main()
    with open(tmp_path / "refresh.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["n"], row["method"]) for row in rows] == [
        (n, method) for n in ("32", "128") for method in refresh.METHODS
    ]
    for n in ("32", "128"):
        drift = {row["method"]: float(row["drift"]) for row in rows if row["n"] == n}
        assert drift["eigh"] < 1e-3 < drift["QR iteration"] < drift["unrefreshed"]
        errors = {row["method"]: float(row["orthogonality"]) for row in rows if row["n"] == n}
        assert max(errors[name] for name in ("eigh", "eigh in fp64", "QR iteration", "two QR iterations")) < 1e-5


def test_optimizer_of_the_first_contender_is_the_default() -> None:
    """What is called SPlus in the table has no option set."""
    (optimizer,) = Run(CONTENDERS[0], TINY, gradients_of(TINY)).optimizers
    defaults = SPlus([torch.zeros(2, 2)]).defaults
    assert {name: optimizer.defaults[name] for name in defaults} == defaults
