"""What a comparison came to: its files of numbers, and the lines that say it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison import REFERENCE, Training
from benchmarks.csv_file import write_csv
from benchmarks.estimates import Difference, Estimate, mean_over
from benchmarks.methods import method_name
from benchmarks.table import REACHED, Entry, brackets, condition_title, estimate_text, state_text, title

OURS = "splus"
DIGITS = 6  # of the numbers in the files


def write_summary(rows: Sequence[Entry], training: Training, path: Path) -> None:
    """One line for each row of the tables; ratios that are not reached, and their intervals, are empty."""
    lines = [
        _place(entry) | {
            "batch_size": training.size(entry.condition.objective, "batch_size", entry.condition.batch),
            "learning_rate": entry.lr, "seeds": len(entry.outcomes), "final_loss": _mean(entry.loss),
            **_columns("sta", entry.steps), **_columns("tta", entry.time), "status": entry.status,
        }
        for entry in rows
    ]  # fmt: skip
    write_csv(lines, path, DIGITS)


def write_details(rows: Sequence[Entry], path: Path) -> None:
    """What else there is of the same lines: weights, brackets, measures, steps to Adam's averages, time and memory."""
    lines = [
        _place(entry) | {
            "batch": entry.condition.batch, "weights": entry.choice.weights,
            "bracketed": entry.choice.bracketed, "note": entry.choice.note,
            **_columns("final_loss", entry.loss), "measure_name": entry.measure, "measure": _mean(entry.measured),
            **_columns("steps_to_adam_ema", entry.steps_ema),
            "seconds_per_step": entry.step_seconds, "seconds_per_step_ratio": entry.step_ratio,
            "state_bytes": entry.state_bytes,
        }
        for entry in rows
    ]  # fmt: skip
    write_csv(lines, path, DIGITS)


def write_differences(rows: Sequence[Entry], path: Path) -> None:
    """Paired differences in final loss of every two rows of a condition, the first less the second."""
    lines = [
        _place(entry) | {
            "batch": entry.condition.batch, "other": other, "difference": difference.mean,
            "low": difference.low, "high": difference.high, "p": difference.p, "pairs": difference.pairs,
        }
        for entry in rows
        for other, difference in entry.against.items()
    ]  # fmt: skip
    write_csv(lines, path, DIGITS)


def _place(entry: Entry) -> dict[str, Any]:
    condition = entry.condition
    return {
        "objective": condition.objective, "start": condition.start, "optimizer": entry.row.name,
        "schedule": condition.schedule,
    }  # fmt: skip


def _columns(name: str, value: Estimate) -> dict[str, float]:
    known = value.complete
    return {
        name: _mean(value),
        f"{name}_low": value.low if known else math.nan,
        f"{name}_high": value.high if known else math.nan,
    }


def _mean(value: Estimate) -> float:
    return value.mean if value.complete else math.nan


def headline(rows: Sequence[Entry]) -> list[str]:
    """A line for each condition with SPlus and Adam, then the means over objectives."""
    lines = []
    for condition in dict.fromkeys(entry.condition for entry in rows):
        says = verdict([entry for entry in rows if entry.condition == condition])
        lines += [f"{condition_title(condition)}: {says}"] if says else []
    return [*lines, *means(rows)]


def verdict(rows: Sequence[Entry]) -> str:
    """How much of Adam's steps and time SPlus needs under one condition, and who else comes close; "" without both."""
    of = {entry.row.name: entry for entry in rows}
    return _reached(of[OURS]) + _rivals(of) if OURS in of and REFERENCE in of else ""


def _reached(entry: Entry) -> str:
    if not entry.steps.total:
        return "no run to compare with"
    if entry.steps.complete:
        return f"{_with_interval(entry.steps)} of Adam's steps, {_with_interval(entry.time)} of its time"
    some = entry.steps.missing < entry.steps.total
    seeds = f" with {entry.steps.missing} of {entry.steps.total} seeds" if some else ""
    return f"SPlus does not reach Adam's final loss within Adam's steps{seeds}"


def _rivals(of: Mapping[str, Entry]) -> str:
    """The best final loss of the others, and whether the difference is one."""
    ours = of[OURS]
    others = [
        e for name, e in of.items() if not name.startswith(OURS) and e.loss.complete and math.isfinite(e.loss.mean)
    ]
    if not others or not ours.loss.complete:
        return ""
    best = min(others, key=lambda entry: entry.loss.mean)
    difference = ours.against.get(best.row.name)
    final = f"; final loss {ours.loss.mean:.3f}, the best other is {best.row.label} with {best.loss.mean:.3f}"
    return final + (f" ({difference_text(difference)})" if difference else "")


def difference_text(difference: Difference) -> str:
    sign = "a difference" if difference.significant else "no significant difference"
    interval = f"95% {difference.low:+.3f} to {difference.high:+.3f}"
    return f"{sign}: {difference.mean:+.3f}, {interval}, p = {difference.p:.2g}, {difference.pairs} seeds"


def means(rows: Sequence[Entry]) -> list[str]:
    """Means over objectives, under the first condition of each, of the optimizers that reach Adam's loss on all.

    The fewest steps first.
    """
    first = [entry for entry in rows if entry.condition.is_first]
    objectives = {entry.condition.objective for entry in first}
    said: list[tuple[float, str]] = []
    for name, label in {entry.row.name: entry.row.label for entry in first if entry.row.name != REFERENCE}.items():
        own = [entry for entry in first if entry.row.name == name and entry.status == REACHED]
        if len(own) == len(objectives) > 1:
            steps = mean_over([entry.steps.values for entry in own])
            time = mean_over([entry.time.values for entry in own])
            shares = f"{_with_interval(steps)} of Adam's steps, {_with_interval(time)} of its time"
            said.append((steps.mean, f"{label}, mean over {len(own)} objectives: {shares}"))
    return [line for _, line in sorted(said)]


def _with_interval(value: Estimate) -> str:
    number, interval = estimate_text(value, "")
    return number + brackets(interval)


def memory(rows: Sequence[Entry]) -> list[str]:
    """A line for each objective: the state of each optimizer under its first condition, and that over Adam's."""
    states: dict[str, dict[str, Entry]] = {}
    for entry in rows:
        if entry.condition.is_first and entry.state_bytes is not None:
            states.setdefault(entry.condition.objective, {}).setdefault(method_name(entry.row.name), entry)
    lines = []
    for objective, of in states.items():
        texts = [(entry.row.label, *state_text(entry, of.get(REFERENCE))) for entry in of.values()]
        each = ", ".join(f"{label} {size} MB{brackets(ratio)}" for label, size, ratio in texts)
        lines.append(f"State of the optimizer, {title(objective).lower()}: {each}")
    return lines
