"""The table and the report, from runs whose curves are made up so that the right answers are known."""

import base64
import csv
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import bracket
from benchmarks.cells import Cell, Outcome, earlier_outcome
from benchmarks.comparison import ADAM, ADAM_EMA, SPLUS, SPLUS_LIVE, Comparison
from benchmarks.report import write_report
from benchmarks.table import Entry, entries, headline, notes, terminal_tables, write_cells_csv, write_comparison_csv

STEPS = tuple(range(0, 101, 10))
COMPARISON = Comparison(
    "smoke",
    ("image_classification", "diffusion"),
    {name: {"adam": 0.001, "splus": 0.1} for name in ("image_classification", "diffusion")},
    limit=3,
    seeds=2,
)


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
    outcome = write_run(directory, 0.2, {"live": straight(1.2), "averaged": straight(worse, 1.0)})
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
    return write_report(COMPARISON, rows, outcomes, output, {"workers": 2, "preset": "smoke"})


def test_ratios_are_those_of_the_curves(rows: list[Entry]) -> None:
    adam, ema, splus, live = rows[:4]
    assert [entry.row for entry in rows[:4]] == [ADAM, ADAM_EMA, SPLUS, SPLUS_LIVE]
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
    assert (splus.row, splus.steps.missing, splus.steps.total) == (SPLUS, 1, 2)
    assert splus.steps.mean == pytest.approx(1 / 1.5)
    assert headline(rows)[1].endswith("does not reach Adam's final loss within Adam's steps with 1 of 2 seeds")


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


def test_csv_files_have_a_line_a_row_and_a_line_a_run(
    rows: list[Entry], outcomes: dict[Cell, Outcome], tmp_path: Path
) -> None:
    write_comparison_csv(rows, tmp_path / "comparison.csv")
    write_cells_csv(outcomes, tmp_path / "cells.csv")
    with open(tmp_path / "comparison.csv") as file:
        table = list(csv.DictReader(file))
    with open(tmp_path / "cells.csv") as file:
        cells = list(csv.DictReader(file))
    assert [(line["objective"], line["row"]) for line in table] == [(e.objective, e.row.label) for e in rows]
    assert float(table[2]["steps_to_adam"]) == pytest.approx(0.5)
    assert (table[6]["steps_to_adam"], table[6]["steps_to_adam_seeds_without"]) == ("", "1")  # no mean of some seeds
    assert len(cells) == len(outcomes)
    assert {line["status"] for line in cells} == {"finished", "diverged", "crashed"}
    assert all(line["directory"].endswith(line["config_hash"]) for line in cells)


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
    assert "python -m train objective=diffusion optimizer=splus" in text


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
    assert write_report(COMPARISON, rows, known, tmp_path, {"workers": 1}).exists()
    write_comparison_csv(rows, tmp_path / "comparison.csv")
    assert [line.split(": ")[1] for line in headline(rows)] == ["no run to compare with"] * 2
