"""The table and the report, from runs whose curves are made up so that the right answers are known."""

import base64
import csv
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from benchmarks import bracket
from benchmarks.cells import Cell, Outcome, earlier_outcome
from benchmarks.comparison import Comparison, Condition, Study, Training
from benchmarks.methods import Method, Row
from benchmarks.report import write_report
from benchmarks.summary import headline, write_differences, write_summary
from benchmarks.table import Entry, entries, notes, terminal_tables

STEPS = tuple(range(0, 101, 10))
OBJECTIVES = ("image_classification", "diffusion")
ADAM = Row("adam", "Adam", "live"), Row("adam_ema", "Adam + EMA", "averaged")
SPLUS = Row("splus", "SPlus", "averaged"), Row("splus_live", "SPlus (live)", "live")
METHODS = (
    Method("adam", ("optimizer=adam",), ADAM, dict.fromkeys(OBJECTIVES, 0.001)),
    Method("splus", ("optimizer=splus",), SPLUS, dict.fromkeys(OBJECTIVES, 0.1)),
)
TRAINING = Training("smoke", (), {}, {}, Path("cells"))
COMPARISON = Comparison(
    tuple(
        Study(Condition(objective), method, TRAINING, limit=3, seeds=2)
        for objective in OBJECTIVES
        for method in METHODS
    )
)
SETTINGS = OmegaConf.create({"title": "SPlus against Adam", "preset": "smoke", "rates": 4})


def straight(final: float, reached_at: float = 1.0) -> list[float]:
    """Losses that fall in a straight line from 2 to `final` and stay there."""
    return [2 - (2 - final) * min(1.0, step / (100 * reached_at)) for step in STEPS]


def write_run(directory: Path, pace: float, curves: dict[str, list[float]], status: str = "finished") -> Outcome:
    """What a training run leaves in its directory. `pace`: seconds a step."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        {"kind": "validation", "step": step, "seconds": pace * step, "weights": weights, "loss": loss, "accuracy": 0.9}
        for weights, losses in curves.items()
        for step, loss in zip(STEPS, losses)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    final = {weights: {"loss": losses[-1], "accuracy": 0.9} for weights, losses in curves.items()}
    result = {"status": status, "step": 100, "steps": 100, "seconds": 100 * pace, "hash": "abc"}
    (directory / "result.json").write_text(json.dumps(result | {"final": final if status == "finished" else {}}))
    outcome = earlier_outcome(directory)
    assert outcome is not None
    return outcome


def run_of(cell: Cell, root: Path) -> Outcome:
    """Adam ends at 1.0 and its averages at 0.9; SPlus is at 1.0 halfway, at twice the time a step."""
    index, seed = bracket.nearest_index(float(cell.config.optimizer.lr)), int(cell.config.seed)
    directory = cell.directory(root)
    if cell.group == "diffusion/splus":
        if index == -3:
            return Outcome(directory, "crashed", 1.0, {}, "Traceback\nValueError: no <luck>\n")
        if index == -2:
            return write_run(directory, 0.2, {}, "diverged")
        final = 1.1 if seed == 1 else 0.5
        return write_run(directory, 0.2, {"live": straight(1.5), "averaged": straight(final)})
    worse = 0.2 * abs(index + 9) if cell.group.endswith("adam") else 0.2 * abs(index + 3)
    if cell.group.endswith("adam"):
        return write_run(
            directory, 0.1, {"live": straight(1 + worse), "ema_0.5": straight(1.2), "ema_0.9": straight(0.9 + worse)}
        )
    outcome = write_run(directory, 0.2, {"live": straight(1.2 + worse), "averaged": straight(worse, 1.0)})
    (directory / "samples.png").write_bytes(b"not really an image")
    return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Outcome]:
    root = tmp_path_factory.mktemp("cells")
    known: dict[Cell, Outcome] = {}
    while new := [cell for cell in COMPARISON.wanted(known) if cell not in known]:
        known |= {cell: run_of(cell, root) for cell in new}
    return known


@pytest.fixture(scope="module")
def rows(outcomes: dict[Cell, Outcome]) -> list[Entry]:
    return entries(COMPARISON, outcomes)


@pytest.fixture(scope="module")
def report(rows: list[Entry], outcomes: dict[Cell, Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("output")
    return write_report(COMPARISON, rows, outcomes, output, SETTINGS, workers=2)


def test_ratios_are_those_of_the_curves(rows: list[Entry]) -> None:
    adam, ema, splus, live = rows[:4]
    assert [entry.row for entry in rows[:4]] == [*ADAM, *SPLUS]
    assert (adam.steps.mean, adam.time.mean, adam.steps_ema.missing) == (1.0, 1.0, 2)  # 0.9 is never reached by Adam
    assert adam.steps_ema.mean != adam.steps_ema.mean  # no number, rather than a wrong one
    assert ema.steps.mean == pytest.approx(1 / 1.1)  # from 2 to 0.9, the target 1.0
    assert ema.steps_ema.mean == 1.0
    assert splus.steps.mean == pytest.approx(0.5)
    assert splus.time.mean == pytest.approx(1.0)
    assert splus.steps_ema.mean == pytest.approx(0.55)
    assert live.steps.missing == 2
    assert (splus.step_seconds, splus.step_ratio) == (pytest.approx(0.2), pytest.approx(2.0))
    assert (ema.choice.weights, splus.lr, adam.lr) == ("ema_0.9", 0.1, 0.001)


def test_seeds_that_do_not_reach_the_target_are_counted(rows: list[Entry]) -> None:
    splus = rows[6]
    assert (splus.row, splus.steps.missing, splus.steps.total, splus.status) == (SPLUS[0], 1, 2, "> budget")
    assert splus.steps.mean == pytest.approx(1 / 1.5)
    line = headline(rows)[1]
    assert "does not reach Adam's final loss within Adam's steps with 1 of 2 seeds" in line
    assert "final loss 0.800, the best other is Adam + EMA with 0.900 (no significant difference: -0.100" in line


def test_rates_that_are_not_bracketed_are_named_with_the_reason(rows: list[Entry]) -> None:
    assert [entry.choice.bracketed for entry in rows] == [True, True, True, True, True, True, False, False]
    assert notes(rows) == ["* Diffusion: best rate not bracketed (a neighbour crashed): SPlus, SPlus (live)"]


def test_the_terminal_table_fits_80_columns(rows: list[Entry]) -> None:
    console = Console(width=80, record=True)
    for table in terminal_tables(rows):
        console.print(table)
    text = console.export_text()
    assert "0.50" in text
    assert "…" not in text


def test_the_summary_has_a_line_a_row_and_no_mean_of_some_seeds(rows: list[Entry], tmp_path: Path) -> None:
    write_summary(rows, TRAINING, tmp_path / "summary.csv")
    with open(tmp_path / "summary.csv") as file:
        reader = csv.DictReader(file)
        table = list(reader)
    names = "objective,start,optimizer,schedule,batch_size,learning_rate,seeds,final_loss,sta,sta_low,sta_high,tta,"
    assert ",".join(reader.fieldnames or ()) == names + "tta_low,tta_high,status"
    assert [(line["objective"], line["optimizer"]) for line in table] == [
        (e.condition.objective, e.row.name) for e in rows
    ]
    assert float(table[2]["sta"]) == pytest.approx(0.5)
    assert [line["status"] for line in table[:4]] == ["reached", "reached", "reached", "> budget"]
    assert (table[6]["sta"], table[6]["sta_low"], table[6]["status"]) == ("", "", "> budget")
    assert {line["batch_size"] for line in table} == {"16"}


def test_differences_are_paired_by_seed(rows: list[Entry], tmp_path: Path) -> None:
    write_differences(rows, tmp_path / "differences.csv")
    with open(tmp_path / "differences.csv") as file:
        table = {(line["objective"], line["optimizer"], line["other"]): line for line in csv.DictReader(file)}
    found = table["diffusion", "splus", "adam"]
    assert (float(found["difference"]), found["pairs"]) == (pytest.approx(-0.2), "2")  # 0.5 and 1.1 less 1
    assert float(found["low"]) < -0.2 < float(found["high"])


def test_curves_of_shorter_runs_are_their_ends(tmp_path: Path) -> None:
    """A schedule that is judged at its end: SPlus has Adam's final loss with 0.4 of the steps, between two budgets."""
    studies = [
        Study(Condition("diffusion", schedule="linear_decay"), method, TRAINING, 1, 1, False, budgets)
        for method, budgets in zip(METHODS, ((), (0.25, 0.5)))
    ]
    comparison = Comparison(tuple(studies))
    ends = {3: 1.3, 6: 0.8, 12: 0.5}  # by steps; Adam's is 1 at 12
    outcomes = {}
    for study in studies:
        for cell in study.wanted({}) or []:
            outcomes[cell] = ended_at(cell, 1.0 if study.method.name == "adam" else ends[12])
        for cell in study.wanted(outcomes):
            if cell not in outcomes:
                outcomes[cell] = ended_at(cell, ends[cell.config.steps])
    splus = next(entry for entry in entries(comparison, outcomes) if entry.row.name == "splus")
    assert splus.steps.mean == pytest.approx((3 + 3 * 0.3 / 0.5) / 12)
    assert splus.loss.mean == 0.5


def ended_at(cell: Cell, loss: float) -> Outcome:
    steps = int(cell.config.steps)
    final = {weights: {"loss": loss} for weights in ("live", "averaged", "ema_0.5")}
    curve = [[0, steps], [0.0, 0.1 * steps], [2.0, loss]]
    result = {"final": final, "curves": dict.fromkeys(final, curve), "status": "finished"}
    return Outcome(Path(cell.name), "finished", 1.0, result)


class Page(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_report_is_one_file_for_light_dark_and_small_screens(report: Path) -> None:
    text = report.read_text()
    elements = Page(text).elements
    for tag, attributes in elements:
        assert tag not in ("script", "link", "iframe")
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or attributes.get("xlink:href") or "#").startswith("#")
    assert not re.search(r"url\((?!#)", text)
    assert any(a.get("name") == "viewport" for tag, a in elements if tag == "meta")
    assert "prefers-color-scheme: dark" in text
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    svgs = [tag for tag, _ in elements if tag == "svg"]
    assert len(svgs) == 2 * 3
    assert not re.search(r"(fill|stroke): ?#(?!ffffff)[0-9a-f]{6}", text)  # every colour follows the page


def test_the_report_shows_samples_and_crashes(report: Path) -> None:
    text = report.read_text()
    assert base64.b64encode(b"not really an image").decode() in text
    assert "diffusion-splus-lr0.1-seed0" in text
    assert "ValueError: no &lt;luck&gt;" in text
    assert "python -m train objective=diffusion preset=smoke schedule=constant optimizer=splus" in text


def test_every_figure_is_also_a_png(report: Path) -> None:
    names = {path.stem for path in (report.parent / "figures").glob("*.png")}
    kinds = ("steps", "seconds", "learning_rate")
    assert names == {f"{objective}-{kind}" for objective in COMPARISON.objectives for kind in kinds}


def test_nothing_to_show_is_shown_as_nothing(tmp_path: Path) -> None:
    crashed = Outcome(tmp_path / "cells" / "gone", "crashed", 1.0, {}, "MemoryError\n")
    known: dict[Cell, Outcome] = {}
    while new := [cell for cell in COMPARISON.wanted(known) if cell not in known]:
        known |= dict.fromkeys(new, crashed)
    rows = entries(COMPARISON, known)
    assert all(entry.lr is None and math.isnan(entry.steps.mean) for entry in rows)
    assert write_report(COMPARISON, rows, known, tmp_path, SETTINGS, workers=1).exists()
    write_summary(rows, TRAINING, tmp_path / "summary.csv")
    assert {line.rpartition(",")[2] for line in (tmp_path / "summary.csv").read_text().splitlines()[1:]} == {
        "no result"
    }
    assert [line.split(": ")[1] for line in headline(rows)] == ["no run to compare with"] * 2
