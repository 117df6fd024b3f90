"""The comparison: the search for learning rates, the sweep of runs in processes, and the command itself."""

import csv
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from benchmarks import bracket, methods
from benchmarks.attempt import DirectoryInUse, only_user_of
from benchmarks.cells import ROOT, Cell, Outcome, earlier_outcome
from benchmarks.command import SettingError
from benchmarks.compare import comparison_from
from benchmarks.comparison import Comparison, Condition, Study
from benchmarks.methods import method
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


def settings(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf" / "comparison"), version_base="1.3"):
        return compose("compare", overrides=["preset=smoke", "objectives=[diffusion]", *overrides])


DIFFUSION = Condition("diffusion")
FIRST = "+first_rates.diffusion={adam:0.001,splus:0.1}"


def planned(*overrides: str) -> Comparison:
    return comparison_from(settings("seeds=2", "rates=8", FIRST, *overrides))


BEST = {"adam": (-9, -8), "splus": (-2, -4), "muon": (-3, -3)}


def outcome_of(cell: Cell) -> Outcome:
    """Adam is best at 0.001 live and at 0.00215 averaged (with decay 0.9), SPlus at 0.0464 and 0.215."""
    index, name = bracket.nearest_index(float(cell.config.optimizer.lr)), cell.group.split("/")[1]
    live, averaged = BEST.get(name, (0, 0))
    final = {"live": {"loss": 1.0 + abs(index - live)}, "ema_0.5": {"loss": 9.0}}
    final["averaged" if name == "splus" else "ema_0.9"] = {"loss": 0.9 + abs(index - averaged)}
    return Outcome(Path(cell.name), "finished", 1.0, {"status": "finished", "final": final})


def run_all(comparison: Comparison) -> dict[Cell, Outcome]:
    outcomes: dict[Cell, Outcome] = {}
    while new := [cell for cell in comparison.wanted(outcomes) if cell not in outcomes]:
        assert sum(comparison.expected(outcomes).values()) >= len(outcomes) + len(new)
        outcomes |= {cell: outcome_of(cell) for cell in new}
    return outcomes


def study_of(comparison: Comparison, name: str, condition: Condition = DIFFUSION) -> Study:
    (found,) = [study for study in comparison.under(condition) if study.method.name == name]
    return found


def test_each_row_is_run_with_all_seeds_at_its_own_best_rate() -> None:
    comparison = planned()
    outcomes = run_all(comparison)
    choices = {row.name: study.choice(row, outcomes) for study, row in comparison.rows(DIFFUSION)}
    assert {name: (choice.index, choice.weights) for name, choice in choices.items()} == {
        "adam": (-9, "live"),
        "adam_ema": (-8, "ema_0.9"),
        "splus": (-4, "averaged"),
        "splus_live": (-2, "live"),
    }
    assert all(choice.bracketed for choice in choices.values())
    adam = study_of(comparison, "adam")
    assert [cell.name for cell in adam.seed_cells(adam.method.rows[1], outcomes)] == [
        "diffusion-adam-lr0.002154-seed0",
        "diffusion-adam-lr0.002154-seed1",
    ]
    tried = {bracket.nearest_index(float(c.config.optimizer.lr)) for c in outcomes if c.group == "diffusion/adam"}
    assert tried == {-10, -9, -8, -7}
    assert len([cell for cell in outcomes if cell.config.seed == 1]) == 4
    assert sum(comparison.expected(outcomes).values()) == len(outcomes) == 4 + 5 + 4


def test_other_conditions_search_from_the_best_rate_of_the_first() -> None:
    comparison = planned("+parts.other={optimizers:[adam],batches:[0.5],schedules:[linear_decay]}")
    condition = Condition("diffusion", schedule="linear_decay", batch=0.5)
    other = study_of(comparison, "adam", condition)
    assert other.wanted({}) == []
    outcomes = run_all(comparison)
    first = other.wanted(outcomes)[0].config
    assert (first.optimizer.lr, first.batch_size) == (bracket.rate(-9), 8)
    assert first.schedule["_target_"].endswith("linear_decay")


def test_schedules_judged_at_their_end_are_run_with_smaller_budgets() -> None:
    comparison = planned("+parts.decay={optimizers:[splus],schedules:[linear_decay],budgets:[0.25,0.5]}")
    outcomes = run_all(comparison)
    study = study_of(comparison, "splus", Condition("diffusion", schedule="linear_decay"))
    runs = [cell.config for cell in study.wanted(outcomes) if cell.config.steps < 12]
    assert sorted((c.steps, c.seed) for c in runs) == sorted(2 * [(3, 0), (3, 1), (6, 0), (6, 1)])
    assert {c.optimizer.lr for c in runs} == {bracket.rate(-4), bracket.rate(-2)}
    assert {c.optimizer.ema_decay for c in runs} == {0.5}


def test_later_starts_share_one_adam_run_of_another_seed() -> None:
    comparison = planned("+parts.later={optimizers:[adam,muon],starts:[early,late]}")
    outcomes = run_all(comparison)
    after = {cell.after for cell in outcomes if cell.after is not None}
    assert sorted((cell.config.steps, cell.config.seed) for cell in after) == [(12, 1000), (48, 1000)]
    assert all(cell.config.keep_checkpoint and cell.config.optimizer.lr == 0.02154 for cell in after)
    for cell in outcomes:
        assert (cell.config.start.directory is None) == (cell.after is None)
        if cell.after is not None:
            assert cell.config.start.key == cell.after.hash


def test_without_a_search_all_rates_of_a_grid_are_run() -> None:
    comparison = planned("+parts.main.searched=false", "rates=5")
    tried = [
        bracket.nearest_index(float(cell.config.optimizer.lr)) for cell in study_of(comparison, "splus").wanted({})
    ]
    assert sorted(tried) == [-5, -4, -3, -2, -1]
    assert tried[0] == -3


def test_variants_are_optimizers_with_other_settings() -> None:
    variant = '+variants.one={optimizer:splus,label:One,settings:["+optimizer.sides=shorter"]}'
    comparison = comparison_from(settings("parts.main.optimizers=[one]", variant))
    (study,) = comparison.studies
    assert [(row.name, row.label) for row in study.method.rows] == [("one", "One"), ("one_live", "One (live)")]
    assert study.wanted({})[0].config.optimizer.sides == "shorter"
    assert study.method.start["diffusion"] == 0.4


def test_a_file_of_an_optimizer_is_all_that_a_comparison_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rate where a sweep begins, its name as label; judged live and by averages if it has none of its own."""
    monkeypatch.setattr(methods, "FOLDER", tmp_path)
    (tmp_path / "mine.yaml").write_text("_target_: torch.optim.Adagrad\nlr: 0.5\nweight_decay: 0.0\n")
    (tmp_path / "free.yaml").write_text("_target_: schedulefree.AdamWScheduleFree\nlr: 0.5\n")
    mine, free = (method(name, ["diffusion"], {}) for name in ("mine", "free"))
    assert [(row.name, row.label, row.weights) for row in mine.rows] == [
        ("mine", "mine", "live"),
        ("mine_ema", "mine + EMA", "averaged"),
    ]
    assert mine.start == {"diffusion": 0.5}
    assert mine.settings == ("optimizer=mine",)
    assert [row.weights for row in free.rows] == ["averaged"]
    (tmp_path / "mine.yaml").write_text("_target_: torch.optim.Adagrad\nlr: 0.5\nsweep: {weights: [best]}\n")
    with pytest.raises(SettingError, match=r"mine: sweep.weights=\['best'\] given; some of live, averaged"):
        method("mine", ["diffusion"], {})


def test_a_crash_of_all_runs_leaves_a_row_without_a_rate() -> None:
    comparison = planned()
    crashed = Outcome(Path("."), "crashed", 1.0, {}, "ValueError: no\n")
    outcomes = dict.fromkeys(comparison.wanted({}), crashed)
    assert set(comparison.wanted(outcomes)) == set(outcomes)
    for study, row in comparison.rows(DIFFUSION):
        assert study.choice(row, outcomes).index is None
        assert study.seed_cells(row, outcomes) == []


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "conf/comparison/preset").glob("*.yaml")))
def test_every_preset_has_cells_whose_configurations_compose(preset: str) -> None:
    with initialize_config_dir(str(ROOT / "conf" / "comparison"), version_base="1.3"):
        config = compose("compare", overrides=[f"preset={preset}", "objectives=[language_modelling]"])
    studies = comparison_from(config).studies
    for study in {study.method.name: study for study in studies}.values():
        cell = study.cell(0, seed=0)
        assert (cell.config.optimizer.lr, cell.config.seed) == (1.0, 0)


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


def deterministic_rows(output: Path, name: str) -> list[dict[str, str]]:
    """The lines of a CSV about language modelling, without what depends on the clock."""
    with open(output / name) as file:
        rows = [row for row in csv.DictReader(file) if "language_modelling" in row.values()]
    return [{k: v for k, v in row.items() if "seconds" not in k and "tta" not in k} for row in rows]


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
    for name in ("report.html", "summary.csv", "runs.csv", "differences.csv", "figures/diffusion-steps.png"):
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
    assert len(deterministic_rows(whole, "summary.csv")) == 4
    for name in ("summary.csv", "details.csv"):
        assert deterministic_rows(killed, name) == deterministic_rows(whole, name)
    runs = [sorted(deterministic_rows(of, "runs.csv"), key=lambda run: run["run"]) for of in (whole, killed)]
    assert runs[0] == runs[1]

    shutil.rmtree(killed / "cells")
    before = {path.name: path.read_bytes() for path in killed.glob("*.csv")}
    again = start_comparison(killed, only)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    assert {path.name: path.read_bytes() for path in killed.glob("*.csv")} == before  # runs.csv stands for the runs


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rates=0", "rates=0 given; at least 1"),
        ("workers=0", "workers=0 given; at least 1"),
        ("objectives=[chess]", "objectives=.* given; choose among"),
        ("+first_rates.diffusion.adam=-1", "first learning rate -1.0 of adam on diffusion given; a positive"),
        ("+first_rates.difusion.adam=1", "first_rates.difusion.adam given; first_rates.<objective>"),
        ("+first_rates.diffusion.adams=1", "first_rates.diffusion.adams given; first_rates.<objective>"),
        ("+parts.main.serched=false", "parts.main.serched given; choose among optimizers, .*searched"),
        ("+variants.one={optimiser:splus}", "variants.one.optimiser given; choose among optimizer"),
        ("only=[most]", "only=most given; the parts of this preset are main"),
        ("parts.main.optimizers=[adan]", "optimizer adan given; choose among adam, .*, or write"),
        ("+parts.main.starts=[middle]", "starts: middle given; choose among initialisation, early, late"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(setting: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        comparison_from(settings(setting))
