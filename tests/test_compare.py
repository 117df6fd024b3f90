"""The comparison: the search for learning rates, the sweep of runs in processes, and the command itself."""

import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from benchmarks import bracket
from benchmarks.attempt import DirectoryInUse, only_user_of
from benchmarks.cells import ROOT, Cell, Outcome, earlier_outcome
from benchmarks.comparison import ADAM, ADAM_EMA, ROWS, SPLUS, Comparison
from benchmarks.pool import Pool
from benchmarks.sweep import run_cells

Losses = Callable[[int], tuple[float | None, ...]]

# The search for the best learning rate


def search_to_the_end(losses: Losses, start: int = 0, limit: int = 20) -> tuple[int, ...]:
    """The indices tried when every run that is asked for is run."""
    known: dict[int, tuple[float | None, ...]] = {}
    while not (search := bracket.search(start, limit, known.get)).finished:
        known |= {index: losses(index) for index in search.indices}
    return search.indices


def test_rates_are_on_a_grid_of_three_a_decade() -> None:
    assert [bracket.rate(index) for index in (-3, -2, -1, 0)] == [0.1, 0.2154, 0.4642, 1.0]
    assert [bracket.nearest_index(bracket.rate(index)) for index in range(-20, 5)] == list(range(-20, 5))


@pytest.mark.parametrize("lr", [0.0, -1.0, math.inf, math.nan])
def test_a_start_that_is_no_rate_is_refused(lr: float) -> None:
    with pytest.raises(ValueError, match="a positive number is required"):
        bracket.nearest_index(lr)


@pytest.mark.parametrize("optimum", range(-6, 7))
def test_the_search_goes_where_the_loss_falls_and_brackets_the_best(optimum: int) -> None:
    tried = search_to_the_end(lambda index: (float((index - optimum) ** 2),))
    losses = {index: float((index - optimum) ** 2) for index in tried}
    assert bracket.best(losses) == optimum
    assert bracket.is_bracketed(losses)
    assert sorted(tried) == list(range(min(optimum, 0) - 1, max(optimum, 0) + 2))  # and no rate more


def test_every_row_that_is_chosen_from_the_runs_is_bracketed() -> None:
    tried = search_to_the_end(lambda index: (abs(index + 3.0), abs(index - 2.0)))
    assert sorted(tried) == list(range(-4, 4))


def test_diverged_runs_bracket_and_send_the_search_down() -> None:
    tried = search_to_the_end(lambda index: (math.inf if index > -4 else -float(index),))
    assert sorted(tried) == [-5, -4, -3, -2, -1, 0, 1]


def test_a_crashed_neighbour_ends_the_search_without_a_bracket() -> None:
    def losses(index: int) -> tuple[float | None, ...]:
        return (None if index == 1 else -float(index),)

    tried = search_to_the_end(losses)
    assert sorted(tried) == [-1, 0, 1]
    assert not bracket.is_bracketed({index: losses(index)[0] for index in tried})
    assert sorted(search_to_the_end(lambda index: (None,))) == [-1, 0, 1]


def test_the_limit_ends_the_search_without_a_bracket() -> None:
    for limit in (1, 2, 3, 4, 7):
        tried = search_to_the_end(lambda index: (-float(index),), limit=limit)
        assert len(tried) == limit
        assert not bracket.is_bracketed({index: -float(index) for index in tried})


def test_what_is_tried_does_not_depend_on_the_order_in_which_runs_end() -> None:
    draw = random.Random(1)
    loss = {index: (draw.random(), draw.random()) for index in range(-40, 40)}
    expected = search_to_the_end(lambda index: loss[index])
    for _ in range(20):
        known: dict[int, tuple[float | None, ...]] = {}
        while not (search := bracket.search(0, 20, known.get)).finished:
            index = draw.choice([index for index in search.indices if index not in known])
            known[index] = loss[index]
        assert search.indices == expected


# The plan: which runs, chosen how

COMPARISON = Comparison("smoke", ("diffusion",), {"diffusion": {"adam": 0.001, "splus": 0.1}}, limit=8, seeds=2)


def outcome_of(cell: Cell) -> Outcome:
    """Adam is best at 0.001 live and at 0.00215 averaged (with decay 0.9), SPlus at 0.215."""
    index = bracket.nearest_index(float(cell.config.optimizer.lr))
    final = {"live": {"loss": 1.0 + abs(index + (9 if cell.group.endswith("adam") else 2))}}
    if cell.group.endswith("adam"):
        final |= {"ema_0.5": {"loss": 9.0}, "ema_0.9": {"loss": 0.9 + abs(index + 8)}}
    else:
        final |= {"averaged": {"loss": 0.5 + abs(index + 2)}}
    return Outcome(Path(cell.name), "finished", 1.0, {"status": "finished", "final": final})


def test_each_row_is_run_with_all_seeds_at_its_own_best_rate() -> None:
    outcomes: dict[Cell, Outcome] = {}
    while new := [cell for cell in COMPARISON.wanted(outcomes) if cell not in outcomes]:
        assert sum(COMPARISON.expected(outcomes).values()) >= len(outcomes) + len(new)
        outcomes |= {cell: outcome_of(cell) for cell in new}
    choices = {row: COMPARISON.choice("diffusion", row, outcomes) for row in ROWS}
    assert [(choice.index, choice.weights) for choice in choices.values()] == [
        (-9, "live"),
        (-8, "ema_0.9"),
        (-2, "averaged"),
        (-2, "live"),
    ]
    assert all(choice.bracketed for choice in choices.values())
    assert [cell.name.split("-")[1:] for cell in COMPARISON.seed_cells("diffusion", ADAM_EMA, outcomes)] == [
        ["adam", "lr0.002154", "seed0"],
        ["adam", "lr0.002154", "seed1"],
    ]
    tried = {bracket.nearest_index(float(c.config.optimizer.lr)) for c in outcomes if c.group == "diffusion/adam"}
    assert tried == {-10, -9, -8, -7}
    seeds = [cell for cell in outcomes if cell.config.seed == 1]
    assert len(seeds) == 3
    assert sum(COMPARISON.expected(outcomes).values()) == len(outcomes) == 4 + 4 + 3


def test_a_crash_of_all_runs_leaves_a_row_without_a_rate() -> None:
    crashed = Outcome(Path("."), "crashed", 1.0, {}, "ValueError: no\n")
    outcomes = dict.fromkeys(COMPARISON.wanted({}), crashed)
    assert COMPARISON.wanted(outcomes) == list(outcomes)
    assert COMPARISON.choice("diffusion", SPLUS, outcomes).index is None
    assert COMPARISON.seed_cells("diffusion", ADAM, outcomes) == []


def test_a_cell_is_keyed_by_what_it_trains_not_by_how_that_was_said() -> None:
    cell = Cell("a", ("objective=diffusion", "optimizer=adam", "preset=smoke"))
    assert cell.hash == Cell("a", ("preset=smoke", "optimizer=adam", "objective=diffusion", "seed=0")).hash
    assert cell.hash != Cell("a", (*cell.overrides, "seed=1")).hash


# The sweep: runs in processes


def toy_run(config: DictConfig, directory: Path) -> dict[str, Any]:
    """A run whose fate its seed decides; it leaves a line in runs.txt each time it is started."""
    with open(directory / "runs.txt", "a") as file:
        file.write("run\n")
    print("a worker prints this")
    if config.seed == 1:
        raise ValueError("no such [luck]")
    if config.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    result = {
        "status": "diverged" if config.seed == 3 else "finished",
        "seconds": 1.0,
        "final": {},
        "seed": config.seed,
    }
    (directory / "result.json").write_text(json.dumps(result))
    return result


def toy_cells(*seeds: int) -> list[Cell]:
    return [Cell(f"seed{seed}", ("preset=smoke", f"seed={seed}")) for seed in seeds]


def test_a_sweep_survives_crashed_and_killed_runs_and_skips_finished_ones(tmp_path: Path) -> None:
    cells = toy_cells(1, 2, 3, 4)
    outcomes = run_cells(lambda known: cells, tmp_path, Pool(2, run=toy_run))
    assert [outcomes[cell].status for cell in cells] == ["crashed", "crashed", "diverged", "finished"]
    directories = [outcomes[cell].directory for cell in cells]
    assert "ValueError: no such [luck]" in (directories[0] / "error.txt").read_text()
    assert "SIGKILL" in (directories[1] / "error.txt").read_text()
    assert "a worker prints this" in (directories[3] / "log.txt").read_text()

    again = run_cells(lambda known: cells, tmp_path, Pool(1, run=toy_run))
    assert [again[cell].status for cell in cells] == ["crashed", "crashed", "diverged", "finished"]
    runs = [len((directory / "runs.txt").read_text().splitlines()) for directory in directories]
    assert runs == [2, 2, 1, 1]


def test_a_sweep_asks_for_more_as_results_come_and_can_stop_at_a_crash(tmp_path: Path) -> None:
    four, crash, never = toy_cells(4, 1, 5)

    def wanted(known: Any) -> list[Cell]:
        return [four, crash, never] if four in known else [four]

    outcomes = run_cells(wanted, tmp_path, Pool(1, run=toy_run), fail_fast=True)
    assert {cell: outcome.status for cell, outcome in outcomes.items()} == {four: "finished", crash: "crashed"}


def test_a_directory_is_for_one_sweep_at_a_time(tmp_path: Path) -> None:
    with only_user_of(tmp_path), pytest.raises(DirectoryInUse, match="in use by another running sweep"):
        run_cells(lambda known: [], tmp_path, Pool(1))
    assert run_cells(lambda known: [], tmp_path, Pool(1)) == {}
    with pytest.raises(ValueError, match="workers=0 given"):
        Pool(0)


# The command


def start_comparison(output: Path, *settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.compare", "preset=smoke", f"output={output}", *settings]
    return subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def deterministic_rows(output: Path) -> list[dict[str, str]]:
    """The table of language modelling, without what depends on the clock."""
    with open(output / "comparison.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["objective"] == "language_modelling"]
    return [{k: v for k, v in row.items() if "seconds_per" not in k and "time" not in k} for row in rows]


def weights_of_runs(output: Path) -> dict[str, str]:
    with open(output / "cells.csv") as file:
        return {r["name"]: r["weights_hash"] for r in csv.DictReader(file) if r["objective"] == "language_modelling"}


def kill_in_the_middle_of_a_run(process: subprocess.Popen[str], output: Path) -> None:
    deadline = time.monotonic() + 60
    while not list(output.glob("cells/*/checkpoint-*[0-9]")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no run has written a checkpoint within a minute"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_the_smoke_comparison_and_one_killed_and_resumed_give_the_same_table(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start_comparison(whole)
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    for name in ("report.html", "comparison.csv", "cells.csv", "figures/diffusion-steps.png"):
        assert (whole / name).stat().st_size > 0
    assert "less than a minute" in output
    assert str(whole / "report.html") in output

    only = "objectives=[language_modelling]"
    kill_in_the_middle_of_a_run(start_comparison(killed, only), killed)
    unfinished = [path for path in killed.glob("cells/*") if earlier_outcome(path) is None]
    assert unfinished
    resumed = start_comparison(killed, only)
    output, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, output
    assert len(deterministic_rows(whole)) == len(ROWS)
    assert deterministic_rows(killed) == deterministic_rows(whole)
    assert weights_of_runs(killed) == weights_of_runs(whole)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rates=0", "rates=0 given; at least 1"),
        ("workers=0", "workers=0 given; at least 1"),
        ("objectives=[chess]", "objectives=.* given; choose among"),
        ("start.diffusion.adam=-1", "start.diffusion.adam=-1.0 given; a positive rate"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(
    tmp_path: Path, setting: str, message: str
) -> None:
    from hydra import compose, initialize_config_dir

    from benchmarks.compare import SettingError, comparison_from

    with initialize_config_dir(str(ROOT / "conf" / "comparison"), version_base="1.3"):
        config = compose("compare", overrides=["preset=smoke", setting])
    with pytest.raises(SettingError, match=message):
        comparison_from(config)
