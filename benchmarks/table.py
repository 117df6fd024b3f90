"""The table of the comparison: its numbers, on the terminal and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks import bracket
from benchmarks.cells import Cell, Outcome
from benchmarks.comparison import ADAM, ADAM_EMA, ROWS, SPLUS, Choice, Comparison, Row
from benchmarks.steps_to_adam import Curve, Spread, seconds_per_step, spread, spread_text, steps_to, time_to
from benchmarks.sweep import Outcomes

Measure = Callable[[Curve, float, Curve], "float | None"]
MEASURES = {"bits_per_byte": "bits/byte", "accuracy": "accuracy"}


@dataclass(frozen=True)
class Entry:
    """One row of the table. Spreads are over seeds; steps and time are ratios to Adam's."""

    objective: str
    row: Row
    choice: Choice
    outcomes: tuple[Outcome, ...]
    loss: Spread
    measure: str
    measured: Spread
    steps: Spread
    time: Spread
    steps_ema: Spread
    step_seconds: float
    step_ratio: float

    @property
    def lr(self) -> float | None:
        return None if self.choice.index is None else bracket.rate(self.choice.index)

    @property
    def curves(self) -> list[Curve]:
        """Validation over the run, one curve a seed; runs that diverged or crashed are left out."""
        return [o.curves[self.choice.weights] for o in self.outcomes if o.status == "finished"]


def entries(comparison: Comparison, outcomes: Outcomes) -> list[Entry]:
    """The rows of the table, by objective."""
    return [entry for objective in comparison.objectives for entry in _of_objective(comparison, objective, outcomes)]


def _of_objective(comparison: Comparison, objective: str, outcomes: Outcomes) -> list[Entry]:
    choices = {row: comparison.choice(objective, row, outcomes) for row in ROWS}
    runs = {row: [outcomes.get(cell) for cell in comparison.seed_cells(objective, row, outcomes)] for row in ROWS}
    curves = {row: [_curve(run, choices[row].weights) for run in runs[row]] for row in ROWS}
    adam_pace = seconds_per_step([curve for curve in curves[ADAM] if curve])
    result = []
    for row in ROWS:
        ended = tuple(run for run in runs[row] if run is not None)
        final = [run.result["final"][choices[row].weights] for run in ended if run.status == "finished"]
        measure = next((name for name in MEASURES if final and name in final[0]), "")
        pace = seconds_per_step([curve for curve in curves[row] if curve])
        result.append(
            Entry(
                objective, row, choices[row], ended,
                loss=spread([curve.losses[-1] if curve else None for curve in curves[row]]),
                measure=measure,
                measured=spread([values[measure] for values in final] if measure else []),
                steps=_ratios(steps_to, row, ADAM, curves),
                time=_ratios(time_to, row, ADAM, curves),
                steps_ema=_ratios(steps_to, row, ADAM_EMA, curves),
                step_seconds=pace,
                step_ratio=pace / adam_pace,
            )
        )  # fmt: skip
    return result


def _curve(run: Outcome | None, weights: str) -> Curve | None:
    return run.curves[weights] if run is not None and run.status == "finished" else None


def _ratios(measure: Measure, row: Row, target: Row, curves: dict[Row, list[Curve | None]]) -> Spread:
    """Steps or time to the final loss of `target`, over Adam's, seed by seed; 1 by definition for the target's own row.

    Seeds for which Adam or the target has no finished run are left out: there is nothing to reach.
    """
    values: list[float | None] = []
    for curve, goal, adam in zip(curves[row], curves[target], curves[ADAM]):
        if goal is not None and adam is not None:
            reached = None if curve is None else measure(curve, goal.losses[-1], adam)
            values.append(1.0 if row == target else reached)
    return spread(values)


HEADINGS = ("steps to Adam", "time to Adam", "steps to Adam+EMA", "final loss", "measure", "best rate", "ms a step")
WIDTHS = (9, 9, 9, 11, 9, 8, 6)  # on the terminal; with the label's 12 and gaps of 1 they make 80 columns


def texts(entry: Entry) -> list[tuple[str, str]]:
    """The texts of a row, its label first, then those under HEADINGS: a number each, and what belongs to it."""
    decay = f"decay {entry.choice.weights.removeprefix('ema_')}" if entry.row == ADAM_EMA and entry.lr else ""
    lr = "–" if entry.lr is None else f"{entry.lr:.3g}"
    pace = (
        ("–", "")
        if math.isnan(entry.step_seconds)
        else (f"{1000 * entry.step_seconds:.3g}", f"×{entry.step_ratio:.2f}")
    )
    return [
        (entry.row.label, decay),
        spread_text(entry.steps, "> 1"),
        spread_text(entry.time, "not reached"),
        spread_text(entry.steps_ema, "> 1"),
        spread_text(entry.loss, "diverged", 3),
        (spread_text(entry.measured, "–", 3)[0], MEASURES[entry.measure]) if entry.measure else ("", ""),
        (lr if entry.choice.bracketed else f"{lr}*", ""),
        pace,
    ]


def terminal_tables(rows: Sequence[Entry]) -> list[Table]:
    """A table for each objective, for a terminal of 80 columns; under each number its range over seeds."""
    tables: dict[str, Table] = {}
    for entry in rows:
        if entry.objective not in tables:
            heading = f"[bold]{title(entry.objective)}[/]"
            table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
            table.add_column(width=12)
            for name, width in zip(HEADINGS, WIDTHS):
                table.add_column(name, justify="right", width=width)
            tables[entry.objective] = table
        cells = [f"{number}\n[dim]{detail}[/]" if detail else number for number, detail in texts(entry)]
        tables[entry.objective].add_row(*cells, style="bold" if entry.row == SPLUS else "")
    return list(tables.values())


def notes(rows: Sequence[Entry]) -> list[str]:
    """What the asterisks stand for: where the best learning rate is not bracketed, and why."""
    labels: dict[tuple[str, str], list[str]] = {}
    for entry in rows:
        if not entry.choice.bracketed:
            labels.setdefault((entry.objective, entry.choice.note), []).append(entry.row.label)
    return [
        f"* {title(objective)}: best rate not bracketed ({note}): {', '.join(names)}"
        for (objective, note), names in labels.items()
    ]


def title(objective: str) -> str:
    return objective.replace("_", " ").capitalize()


def headline(rows: Sequence[Entry]) -> list[str]:
    """A line for each objective: how much of Adam's steps and time SPlus needs."""
    lines = []
    for entry in rows:
        if entry.row != SPLUS:
            continue
        text = "SPlus does not reach Adam's final loss within Adam's steps"
        if entry.steps.missing == 0:
            (steps, steps_range), (time, time_range) = spread_text(entry.steps, ""), spread_text(entry.time, "")
            text = f"{steps}{brackets(steps_range)} of Adam's steps, {time}{brackets(time_range)} of its time"
        elif entry.steps.missing < entry.steps.total:
            text += f" with {entry.steps.missing} of {entry.steps.total} seeds"
        lines.append(f"{title(entry.objective)}: {text if entry.steps.total else 'no run to compare with'}")
    return lines


def brackets(text: str) -> str:
    return f" ({text})" if text else ""


def write_comparison_csv(rows: Sequence[Entry], path: Path) -> None:
    """One line a row of the table."""
    lines = []
    for e in rows:
        line: dict[str, Any] = {
            "objective": e.objective, "row": e.row.label, "weights": e.choice.weights, "learning_rate": e.lr,
            "bracketed": e.choice.bracketed, "note": e.choice.note, "seeds": len(e.outcomes),
        }  # fmt: skip
        spreads = {
            "final_loss": e.loss, "measure": e.measured, "steps_to_adam": e.steps, "time_to_adam": e.time,
            "steps_to_adam_ema": e.steps_ema,
        }  # fmt: skip
        for name, value in spreads.items():
            complete = value.missing == 0
            line |= {
                name: value.mean if complete else math.nan, f"{name}_low": value.low, f"{name}_high": value.high,
                f"{name}_seeds_without": value.missing,
            }  # fmt: skip
        line |= {
            "measure_name": e.measure,
            "seconds_per_step": e.step_seconds,
            "seconds_per_step_ratio": e.step_ratio,
        }
        lines.append(line)
    _write_csv(lines, path)


def write_cells_csv(outcomes: Outcomes, path: Path) -> None:
    """One line a run."""
    names = sorted({weights for o in outcomes.values() for weights in o.result.get("final") or {}})
    lines = []
    for cell, o in sorted(outcomes.items(), key=lambda item: item[0].name):
        final = o.result.get("final") or {}
        objective, optimizer = cell.group.split("/")
        lines.append({
            "name": cell.name, "objective": objective, "optimizer": optimizer,
            "learning_rate": cell.config["optimizer"]["lr"], "seed": cell.config["seed"], "status": o.status,
            "step": o.result.get("step"), "steps": cell.config["steps"],
            **{f"final_{weights}": final.get(weights, {}).get("loss") for weights in names},
            "seconds": o.result.get("seconds"), "weights_hash": o.result.get("hash"),
            "config_hash": cell.hash, "directory": f"cells/{o.directory.name}",
        })  # fmt: skip
    _write_csv(lines, path)


def _write_csv(lines: Sequence[dict[str, Any]], path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]) if lines else ["empty"])
        writer.writeheader()
        writer.writerows({key: _plain(value) for key, value in line.items()} for line in lines)


def _plain(value: Any) -> Any:
    """Numbers that are not there as empty fields, others with six significant digits."""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return value


def reproduce(cell: Cell) -> str:
    """The command that trains one cell alone."""
    return "python -m train " + " ".join(cell.overrides)
