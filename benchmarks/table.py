"""The tables of a comparison: their numbers, on the terminal and as CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks import bracket
from benchmarks.cells import Cell, Outcome
from benchmarks.comparison import (
    CONSTANT,
    EVERY_RUN_DIVERGED,
    INITIALISATION,
    REFERENCE,
    Choice,
    Comparison,
    Condition,
    Study,
    best_weights,
)
from benchmarks.estimates import Difference, Estimate, estimate, paired_difference
from benchmarks.methods import AVERAGED, Row
from benchmarks.steps_to_adam import Curve, seconds_per_step, steps_to, time_to
from benchmarks.sweep import Outcomes

Measure = Callable[[Curve, float, Curve], "float | None"]
MEASURES = {"bits_per_byte": "bits/byte", "accuracy": "accuracy"}
REACHED, BEYOND, DIVERGED, UNKNOWN = "reached", "> budget", "diverged", "no result"


@dataclass(frozen=True)
class Entry:
    """One row of a table: estimates over seeds, steps and time as ratios to Adam's.

    Attributes:
        curves: of each seed with these weights, in the order of the seeds; None where there is none.
        steps, time: until the final loss of Adam.
        steps_ema: until that of Adam's averages.
        against: the paired differences in final loss from other rows of the condition, by their names.
    """

    condition: Condition
    row: Row
    choice: Choice
    outcomes: tuple[Outcome, ...]
    curves: tuple[Curve | None, ...]
    loss: Estimate
    measure: str
    measured: Estimate
    steps: Estimate
    time: Estimate
    steps_ema: Estimate
    step_seconds: float
    step_ratio: float
    state_bytes: int | None
    against: Mapping[str, Difference]

    @property
    def lr(self) -> float | None:
        return None if self.choice.index is None else bracket.rate(self.choice.index)

    @property
    def status(self) -> str:
        if self.choice.index is None:
            return DIVERGED if self.choice.note == EVERY_RUN_DIVERGED else UNKNOWN
        if any(outcome.status == "diverged" for outcome in self.outcomes):
            return DIVERGED
        if not self.steps.total:
            return UNKNOWN
        return REACHED if self.steps.complete else BEYOND


def entries(comparison: Comparison, outcomes: Outcomes) -> list[Entry]:
    """The rows of the tables, condition by condition."""
    return [entry for condition in comparison.conditions for entry in _under(comparison, condition, outcomes)]


@dataclass(frozen=True)
class _Runs:
    """The runs of a row at its best rate: of each seed, None where it has not ended or crashed."""

    study: Study
    row: Row
    choice: Choice
    ended: tuple[Outcome | None, ...]
    curves: tuple[Curve | None, ...]

    @classmethod
    def of(cls, study: Study, row: Row, outcomes: Outcomes) -> _Runs:
        choice = study.choice(row, outcomes)
        ended = [outcomes.get(cell) for cell in study.seed_cells(row, outcomes)]
        found = [None if o is None or o.status == "crashed" else o for o in ended]
        curves: list[Curve | None] = []
        for seed, outcome in enumerate(found):
            shorter = [outcomes.get(study.cell(choice.index or 0, seed, budget)) for budget in study.budgets]
            curves.append(_curve(outcome, shorter, choice.weights))
        return cls(study, row, choice, tuple(found), tuple(curves))

    @property
    def paces(self) -> list[Curve]:
        """The curves of the runs themselves."""
        return [o.curves[self.choice.weights] for o in self.ended if o is not None and o.status == "finished"]

    @property
    def finals(self) -> list[float | None]:
        return [None if o is None else o.loss(self.choice.weights) for o in self.ended]


def _curve(run: Outcome | None, shorter: Sequence[Outcome | None], weights: str) -> Curve | None:
    """Validation over a run; if there are shorter runs, where all begin, their ends and its own."""
    if run is None or run.status != "finished":
        return None
    runs = [o for o in shorter if o is not None and o.status == "finished"]
    if not runs:
        return run.curves[weights]
    points = [_point(run.curves[weights], 0)]
    for outcome in (*runs, run):
        own = weights if weights in outcome.curves else best_weights(outcome, AVERAGED)
        points.append(_point(outcome.curves[own], -1))
    return Curve(*map(tuple, zip(*sorted(points))))


def _point(curve: Curve, index: int) -> tuple[int, float, float]:
    return curve.steps[index], curve.seconds[index], curve.losses[index]


def _under(comparison: Comparison, condition: Condition, outcomes: Outcomes) -> list[Entry]:
    runs = {row.name: _Runs.of(study, row, outcomes) for study, row in comparison.rows(condition)}
    adam, adam_ema = runs.get(REFERENCE), runs.get(f"{REFERENCE}_ema")
    adam_pace = seconds_per_step(adam.paces) if adam else math.nan
    return [_entry(condition, of_row, runs, adam, adam_ema, adam_pace) for of_row in runs.values()]


def _entry(
    condition: Condition,
    of_row: _Runs,
    runs: Mapping[str, _Runs],
    adam: _Runs | None,
    adam_ema: _Runs | None,
    adam_pace: float,
) -> Entry:
    ended = tuple(outcome for outcome in of_row.ended if outcome is not None)
    finished = [outcome for outcome in ended if outcome.status == "finished"]
    final = [outcome.result["final"][of_row.choice.weights] for outcome in finished]
    measure = next((name for name in MEASURES if final and name in final[0]), "")
    pace = seconds_per_step(of_row.paces)
    others = {name: of for name, of in runs.items() if name != of_row.row.name}
    differences = {name: paired_difference(of_row.finals, of.finals) for name, of in others.items()}
    return Entry(
        condition, of_row.row, of_row.choice, ended, of_row.curves,
        loss=estimate(of_row.finals),
        measure=measure,
        measured=estimate([values[measure] for values in final] if measure else []),
        steps=_ratios(steps_to, of_row, adam, adam),
        time=_ratios(time_to, of_row, adam, adam),
        steps_ema=_ratios(steps_to, of_row, adam_ema, adam),
        step_seconds=pace,
        step_ratio=pace / adam_pace,
        state_bytes=next((outcome.result.get("state_bytes") for outcome in finished), None),
        against={name: difference for name, difference in differences.items() if difference is not None},
    )  # fmt: skip


def _ratios(measure: Measure, of_row: _Runs, target: _Runs | None, adam: _Runs | None) -> Estimate:
    """Steps or time to the final loss of `target`, over Adam's, seed by seed; 1 by definition for the target's own row.

    Seeds for which Adam or the target has no finished run are left out: there is nothing to reach.
    """
    if target is None or adam is None:
        return estimate([])
    values: list[float | None] = []
    for curve, goal, reference in zip(of_row.curves, target.curves, adam.curves):
        if goal is not None and reference is not None:
            reached = None if curve is None else measure(curve, goal.losses[-1], reference)
            values.append(1.0 if of_row.row == target.row else reached)
    return estimate(values)


HEADINGS = ("steps to Adam", "time to Adam", "steps to Adam+EMA", "final loss", "measure", "best rate", "ms a step")
WIDTHS = (9, 9, 9, 11, 9, 8, 6)  # on the terminal; with the label's 12 and gaps of 1 they make 80 columns


def texts(entry: Entry) -> list[tuple[str, str]]:
    """The texts of a row, its label first, then those under HEADINGS: a number each, and what belongs to it."""
    decay = f"decay {entry.choice.weights.removeprefix('ema_')}" if entry.choice.weights.startswith("ema_") else ""
    lr = "–" if entry.lr is None else f"{entry.lr:.3g}"
    pace = (
        ("–", "")
        if math.isnan(entry.step_seconds)
        else (f"{1000 * entry.step_seconds:.3g}", "" if math.isnan(entry.step_ratio) else f"×{entry.step_ratio:.2f}")
    )
    return [
        (entry.row.label, decay),
        estimate_text(entry.steps, "> 1"),
        estimate_text(entry.time, "not reached"),
        estimate_text(entry.steps_ema, "> 1"),
        estimate_text(entry.loss, "diverged", 3),
        (estimate_text(entry.measured, "–", 3)[0], MEASURES[entry.measure]) if entry.measure else ("", ""),
        (lr if entry.choice.bracketed else f"{lr}*", ""),
        pace,
    ]


def state_text(entry: Entry, adam: Entry | None) -> tuple[str, str]:
    """Megabytes of the optimizer's state, and that over Adam's."""
    if entry.state_bytes is None:
        return "–", ""
    ratio = "" if adam is None or not adam.state_bytes else f"×{entry.state_bytes / adam.state_bytes:.2f}"
    return f"{entry.state_bytes / 1e6:.2f}", ratio


def estimate_text(value: Estimate, absent: str, digits: int = 2) -> tuple[str, str]:
    """A number and, smaller, what belongs to it: ("0.52", "0.50–0.54"), or ("> 1", "in 1 of 2, else 0.93").

    Args:
        absent: what a seed without a value is called.
    """
    if value.total == 0:
        return "–", ""
    if value.missing == value.total:
        return absent, ""
    mean = f"{value.mean:.{digits}f}"
    if value.missing:
        return absent, f"in {value.missing} of {value.total}, else {mean}"
    low, high = f"{value.low:.{digits}f}", f"{value.high:.{digits}f}"
    return mean, "" if low == high else f"{low}–{high}"


def terminal_tables(rows: Sequence[Entry]) -> list[Table]:
    """A table for each condition, for a terminal of 80 columns; under each number its interval."""
    tables: dict[Condition, Table] = {}
    for entry in rows:
        if entry.condition not in tables:
            heading = f"[bold]{condition_title(entry.condition)}[/]"
            table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
            table.add_column(width=12)
            for name, width in zip(HEADINGS, WIDTHS):
                table.add_column(name, justify="right", width=width)
            tables[entry.condition] = table
        cells = [f"{number}\n[dim]{detail}[/]" if detail else number for number, detail in texts(entry)]
        tables[entry.condition].add_row(*cells, style="bold" if entry.row.name == "splus" else "")
    return list(tables.values())


def condition_title(condition: Condition) -> str:
    """In words, what differs from the first condition of the objective."""
    parts = [title(condition.objective)]
    if condition.start != INITIALISATION:
        parts.append(f"from {condition.start} in an Adam run")
    if condition.schedule != CONSTANT:
        parts.append(condition.schedule.replace("_", " "))
    if condition.batch != 1:
        parts.append(f"batch × {condition.batch:g}")
    return ", ".join(parts)


def notes(rows: Sequence[Entry]) -> list[str]:
    """What the asterisks stand for: where the best learning rate is not bracketed, and why."""
    labels: dict[tuple[Condition, str], list[str]] = {}
    for entry in rows:
        if not entry.choice.bracketed:
            labels.setdefault((entry.condition, entry.choice.note), []).append(entry.row.label)
    return [
        f"* {condition_title(condition)}: best rate not bracketed ({note}): {', '.join(names)}"
        for (condition, note), names in labels.items()
    ]


def brackets(text: str) -> str:
    return f" ({text})" if text else ""


def title(objective: str) -> str:
    return objective.replace("_", " ").capitalize()


def reproduce(cell: Cell) -> str:
    """The command that trains one cell alone."""
    return "python -m train " + " ".join(cell.overrides)
