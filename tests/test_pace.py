"""Clocks measured side by side: turns, their ratios, what they make of runs, and what is kept of them."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from rich.console import Console

from benchmarks.cells import ROOT, Cell, Outcome, code_digest, present_origin
from benchmarks.command import SettingError
from benchmarks.compare import comparison_from
from benchmarks.comparison import Comparison, Condition
from benchmarks.pace import (
    FILE,
    Pace,
    clocks,
    full_trials,
    measure,
    on_common_clocks,
    pace,
    read,
    reference_step,
    timed_studies,
)
from benchmarks.steps_to_adam import Curve
from benchmarks.sweep import Ended, Task
from benchmarks.turns import Trial, take_turns


def settings(output: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf" / "comparison"), version_base="1.3"):
        given = ["preset=smoke", "objectives=[diffusion]", f"output={output}"]
        return compose("compare", overrides=[*given, *overrides])


def trial(steps: int = 12, turn: int = 4, rounds: int = 3, methods: Sequence[str] = ("adam", "splus")) -> Trial:
    cells = tuple(
        Cell(name, ("objective=diffusion", "preset=smoke", f"optimizer={name}"), f"diffusion/{name}")
        for name in methods
    )
    return Trial("diffusion-turns", cells, steps, turn, rounds)


def turns(trial: Trial, costs: Sequence[Sequence[float]], speed: np.ndarray) -> dict[str, Any]:
    """What a trial gives if the runs' steps cost so many seconds in each turn, on a machine of this [round][turn]."""
    lengths = np.diff([0, *trial.ends])
    work = np.array(costs).T * lengths[:, None]  # [turn][run]
    seconds = work * speed[:, :, None]
    return {"made_by": present_origin(), "training": seconds.tolist(), "averages": (0.1 * seconds).tolist()}


def test_load_that_slows_all_optimizers_alike_leaves_no_trace() -> None:
    """The clock is that of a machine with the median speed, however much that changes from turn to turn."""
    of, costs = trial(), [[2.0, 2.0, 2.0], [5.0, 3.0, 3.0]]
    speed = np.array([[1.0, 3.0, 7.0], [1.0, 3.0, 1.0], [0.5, 3.0, 1.0]])
    result = turns(of, costs, speed)
    assert reference_step(of, result) == 2.0
    for run, expected in enumerate(([8.0, 16.0, 24.0], [20.0, 32.0, 44.0])):
        found = pace(of, result, run, reference_step(of, result))
        np.testing.assert_allclose(found.seconds, expected)
        np.testing.assert_allclose(found.averages, np.array(expected) / 10)


def test_load_on_one_turn_is_outvoted_by_the_other_rounds() -> None:
    of = trial()
    result = turns(of, [[2.0] * 3, [3.0] * 3], np.ones((3, 3)))
    result["training"][1][2][1] *= 10
    np.testing.assert_allclose(pace(of, result, 1, 2.0).seconds, [12.0, 24.0, 36.0])


def test_between_turns_the_clock_is_straight_and_after_them_as_in_the_last_50_steps() -> None:
    steps = (10, 20, 30, 70)
    clock = Pace(steps, (40.0, 50.0, 55.0, 65.0), (1.0, 2.0, 3.0, 4.0))
    assert [clock.at(step, "live") for step in (0, 5, 15, 70)] == [0.0, 20.0, 45.0, 65.0]
    assert clock.at(100, "averaged") == pytest.approx(65 + 30 * 15 / 50)
    assert clock.at(100, "ema_0.9") == pytest.approx(65 + 30 * 15 / 50 + 4 + 30 * 2 / 50)
    short = Pace((4, 6), (8.0, 10.0), (0.0, 0.0))
    assert short.at(12, "live") == pytest.approx(10 + 6 * 10 / 6)


def run_of(cell: Cell, seconds: float) -> Outcome:
    """A run whose own clock says so many seconds a step."""
    curve = [(0, 6, 12), (0.0, 6 * seconds, 12 * seconds), (3.0, 2.0, 1.0)]
    result = {"status": "finished", "step": 12, "seconds": 12 * seconds, "final": {}, "curves": {"live": curve}}
    return Outcome(Path(cell.name), "finished", 12 * seconds, result)


class Turns:
    """An executor whose trials have runs with steps of 2, 4, 6, … seconds, times its own factor."""

    workers = 1

    def __init__(self, factor: float = 1.0, error: str = "") -> None:
        self.factor, self.error = factor, error
        self.seen: list[list[str]] = []

    def start(self, cell: Task, directory: Path) -> None:
        assert isinstance(cell, Trial)
        self.trial = cell
        self.seen.append([of.group for of in cell.cells])

    def collect(self, timeout: float) -> list[Ended]:
        if self.error:
            return [Ended(self.trial, None, self.error)]
        costs = [[2.0 * (run + 1)] * len(self.trial.ends) for run in range(len(self.trial.cells))]
        speed = np.full((self.trial.rounds, len(self.trial.ends)), self.factor)
        return [Ended(self.trial, turns(self.trial, costs, speed))]

    def close(self) -> None:
        pass


def seconds(outcomes: Mapping[Cell, Outcome]) -> dict[str, tuple[float, ...]]:
    return {cell.group: outcome.curves["live"].seconds for cell, outcome in outcomes.items()}


def first_cells(comparison: Comparison) -> dict[Cell, Outcome]:
    """A run of each study; those of the second took place while the machine was slow."""
    cells = [study.cell(0, 0) for study in comparison.studies]
    return {cell: run_of(cell, seconds=100.0 * number) for number, cell in enumerate(cells, 1)}


def test_runs_have_the_clocks_of_their_optimizers_whatever_their_own_say(tmp_path: Path) -> None:
    config = settings(tmp_path)
    comparison, executor = comparison_from(config), Turns()
    outcomes = first_cells(comparison)
    assert on_common_clocks(outcomes, comparison, config) == outcomes
    assert clocks(comparison, config) == "each run's own"
    assert measure(comparison, config, lambda: executor, Console(quiet=True))
    timed = on_common_clocks(outcomes, comparison, config)
    assert seconds(timed) == {"diffusion/adam": (0.0, 12.0, 24.0), "diffusion/splus": (0.0, 24.0, 48.0)}
    assert {cell: (o.seconds, o.curves["live"].losses) for cell, o in timed.items()} == {
        cell: (o.seconds, (3.0, 2.0, 1.0)) for cell, o in outcomes.items()
    }
    assert clocks(comparison, config) == "4 steps of each optimizer, in turns of 2, 1 times: paces.csv"


def test_optimizers_that_come_later_are_timed_beside_the_reference_and_on_its_clock(tmp_path: Path) -> None:
    """Also if the machine has become three times as slow by then; nothing that is known is timed again."""
    first, second = settings(tmp_path), settings(tmp_path, "parts.main.optimizers=[sgd,splus,adam]")
    executor, slow = Turns(), Turns(factor=3.0)
    assert measure(comparison_from(first), first, lambda: executor, Console(quiet=True))
    before = (tmp_path / FILE).read_text()
    for _ in range(2):
        assert measure(comparison_from(second), second, lambda: slow, Console(quiet=True))
    assert slow.seen == [["diffusion/adam", "diffusion/sgd"]]
    assert (tmp_path / FILE).read_text().startswith(before)
    paces = timed_studies(comparison_from(second), second)
    assert {group: of.at(12, "live") for group, of in paces.items()} == {
        "diffusion/adam": 24.0,
        "diffusion/splus": 48.0,
        "diffusion/sgd": 48.0,
    }


def test_runs_keep_their_own_clocks_until_all_optimizers_beside_them_are_timed(tmp_path: Path) -> None:
    first, second = settings(tmp_path), settings(tmp_path, "parts.main.optimizers=[adam,splus,sgd]")
    assert measure(comparison_from(first), first, Turns, Console(quiet=True))
    comparison = comparison_from(second)
    outcomes = first_cells(comparison)
    assert seconds(on_common_clocks(outcomes, comparison, second)) == seconds(outcomes)
    assert clocks(comparison, second) == "each run's own"


def test_other_settings_and_batch_sizes_are_timed_anew(tmp_path: Path) -> None:
    first = settings(tmp_path)
    assert measure(comparison_from(first), first, Turns, Console(quiet=True))
    for override, trials in (
        ("pace.turn=1", 1),
        ('settings=["model.width=16"]', 1),
        ("+parts.main.batches=[1,0.5]", 1),
    ):
        executor, other = Turns(), settings(tmp_path, override)
        assert measure(comparison_from(other), other, lambda executor=executor: executor, Console(quiet=True))  # type: ignore[misc]
        assert len(executor.seen) == trials


def test_schedules_and_starts_share_the_clock_of_their_batch_size(tmp_path: Path) -> None:
    config = settings(
        tmp_path, "+parts.later={optimizers:[adam],starts:[early]}", "+parts.half={optimizers:[adam],batches:[0.5]}"
    )
    comparison, executor = comparison_from(config), Turns()
    assert set(full_trials(comparison, config.pace)) == {("diffusion", 1.0), ("diffusion", 0.5)}
    assert measure(comparison, config, lambda: executor, Console(quiet=True))
    paces = timed_studies(comparison, config)
    later = Condition("diffusion", start="early")
    assert paces[f"{later.name}/adam"] == paces["diffusion/adam"]
    assert "diffusion-batch0.5/adam" in paces


def test_clocks_of_other_code_are_said_and_each_set_of_optimizers_has_a_directory(tmp_path: Path) -> None:
    first, second = settings(tmp_path), settings(tmp_path, "parts.main.optimizers=[sgd,splus,adam]")
    assert measure(comparison_from(first), first, Turns, Console(quiet=True))
    lines = (tmp_path / FILE).read_text()
    for origin, said in ((lines, False), (lines.replace(code_digest(), "0" * 12), True)):
        (tmp_path / FILE).write_text(origin)
        console = Console(record=True, width=200, quiet=False)
        with console.capture() as printed:
            assert measure(comparison_from(second), second, Turns, console)
        assert ("2 clocks were measured with other code" in printed.get()) == said
    assert len(list(tmp_path.glob("turns/diffusion-turns-*"))) == 2


def test_a_trial_that_crashes_is_said_and_leaves_the_runs_their_own_clocks(tmp_path: Path) -> None:
    config = settings(tmp_path)
    comparison, console = comparison_from(config), Console(record=True, width=200, quiet=False)
    with console.capture() as printed:
        assert not measure(comparison, config, lambda: Turns(error="Traceback\nValueError: no [luck]\n"), console)
    assert "✗ diffusion-turns: ValueError: no [luck] (see" in printed.get()
    (error,) = tmp_path.glob("turns/diffusion-turns-*/error.txt")
    assert "no [luck]" in error.read_text()
    assert read(tmp_path / FILE) == {}


def test_without_rounds_nothing_is_timed(tmp_path: Path) -> None:
    config = settings(tmp_path, "pace.rounds=0")
    executor = Turns()
    assert measure(comparison_from(config), config, lambda: executor, Console(quiet=True))
    assert executor.seen == []
    with pytest.raises(SettingError, match=r"pace.turn=0 given; at least 1 is required"):
        comparison_from(settings(tmp_path, "pace.turn=0"))


def test_optimizers_take_turns_of_their_steps_in_each_round(tmp_path: Path) -> None:
    """Times of every turn of every run, the last one shorter; the harness's averages apart from the training."""
    of = trial(steps=5, turn=2, rounds=2, methods=("adam", "splus", "schedulefree"))
    result = take_turns(of.config, tmp_path)
    for name in ("training", "averages"):
        assert np.array(result[name]).shape == (2, 3, 3)
        assert (np.array(result[name]) > 0).all()
    assert (np.array(result["averages"]) < np.array(result["training"])).all()
    found = pace(of, result, 1, reference_step(of, result))
    assert found.steps == (2, 4, 5)
    assert all(math.isfinite(value) and value > 0 for value in (*found.seconds, *found.averages))


def test_what_is_kept_is_what_was_measured(tmp_path: Path) -> None:
    config = settings(tmp_path)
    comparison = comparison_from(config)
    assert measure(comparison, config, Turns, Console(quiet=True))
    (of,) = full_trials(comparison, config.pace).values()
    known = read(tmp_path / FILE)
    assert known[of.key(of.cells[1])] == Pace((2, 4), (8.0, 16.0), (0.8, 1.6))
    assert of.key(of.cells[1]) != replace(of, rounds=5).key(of.cells[1])
    with open(tmp_path / FILE, newline="") as file:
        assert [line["optimizer"] for line in csv.DictReader(file)] == ["adam"] * 2 + ["splus"] * 2


def test_a_curve_on_another_clock_is_otherwise_the_same() -> None:
    cell = trial().cells[0]
    timed = Pace((10,), (5.0,), (1.0,)).retimed(run_of(cell, 100.0))
    assert timed.curves == {"live": Curve((0, 6, 12), (0.0, 3.0, 6.0), (3.0, 2.0, 1.0))}
