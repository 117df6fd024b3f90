"""What a comparison came to: its files of numbers, and the lines that say it."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison import REFERENCE, Condition, Training
from benchmarks.estimates import Difference, Estimate, mean_over
from benchmarks.table import REACHED, Entry, condition_title, estimate_text, title

OURS = "splus"


def write_summary(rows: Sequence[Entry], training: Training, path: Path) -> None:
    """One line for each row of the tables; ratios that are not reached, and their intervals, are empty."""
    lines = []
    for entry in rows:
        condition = entry.condition
        lines.append({
            "objective": condition.objective, "start": condition.start, "optimizer": entry.row.name,
            "schedule": condition.schedule,
            "batch_size": training.size(condition.objective, "batch_size", condition.batch),
            "learning_rate": entry.lr, "seeds": len(entry.outcomes), "final_loss": _mean(entry.loss),
            **_columns("sta", entry.steps), **_columns("tta", entry.time), "status": entry.status,
        })  # fmt: skip
    write_csv(lines, path)


def write_details(rows: Sequence[Entry], path: Path) -> None:
    """What else there is of the same lines: weights, brackets, measures, steps to Adam's averages, time and memory."""
    lines = []
    for entry in rows:
        condition = entry.condition
        lines.append({
            "objective": condition.objective, "start": condition.start, "optimizer": entry.row.name,
            "schedule": condition.schedule, "batch": condition.batch, "weights": entry.choice.weights,
            "bracketed": entry.choice.bracketed, "note": entry.choice.note,
            **_columns("final_loss", entry.loss), "measure_name": entry.measure, "measure": _mean(entry.measured),
            **_columns("steps_to_adam_ema", entry.steps_ema),
            "seconds_per_step": entry.step_seconds, "seconds_per_step_ratio": entry.step_ratio,
            "state_bytes": entry.state_bytes,
        })  # fmt: skip
    write_csv(lines, path)


def write_differences(rows: Sequence[Entry], path: Path) -> None:
    """Paired differences in final loss of every two rows of a condition, the first less the second."""
    lines = []
    for entry in rows:
        condition = entry.condition
        for other, difference in entry.against.items():
            lines.append({
                "objective": condition.objective, "start": condition.start, "schedule": condition.schedule,
                "batch": condition.batch, "optimizer": entry.row.name, "other": other,
                "difference": difference.mean, "low": difference.low, "high": difference.high, "p": difference.p,
                "pairs": difference.pairs,
            })  # fmt: skip
    write_csv(lines, path)


def _columns(name: str, value: Estimate) -> dict[str, float]:
    known = value.complete
    return {
        name: _mean(value),
        f"{name}_low": value.low if known else math.nan,
        f"{name}_high": value.high if known else math.nan,
    }


def _mean(value: Estimate) -> float:
    return value.mean if value.complete else math.nan


def write_csv(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]) if lines else ["empty"])
        writer.writeheader()
        writer.writerows({key: _plain(value) for key, value in line.items()} for line in lines)


def _plain(value: Any) -> Any:
    """Numbers that are not there as empty fields, others with six significant digits."""
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else ""
    return value


def headline(rows: Sequence[Entry]) -> list[str]:
    """A line for each condition: how much of Adam's steps and time SPlus needs, and who else comes close."""
    lines = []
    for condition in dict.fromkeys(entry.condition for entry in rows):
        of = {entry.row.name: entry for entry in rows if entry.condition == condition}
        if OURS in of and REFERENCE in of:
            lines.append(f"{condition_title(condition)}: {_verdict(of[OURS])}{_rivals(of)}")
    return [*lines, *_means(rows)]


def _verdict(entry: Entry) -> str:
    if not entry.steps.total:
        return "no run to compare with"
    if entry.steps.complete:
        (steps, interval), (time, time_interval) = estimate_text(entry.steps, ""), estimate_text(entry.time, "")
        return f"{steps}{brackets(interval)} of Adam's steps, {time}{brackets(time_interval)} of its time"
    text = "SPlus does not reach Adam's final loss within Adam's steps"
    return text + (
        f" with {entry.steps.missing} of {entry.steps.total} seeds" if entry.steps.missing < entry.steps.total else ""
    )


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


def _means(rows: Sequence[Entry]) -> Iterator[str]:
    """SPlus's mean over objectives under the first condition of each, and of the others that reach Adam's loss."""
    first = [entry for entry in rows if entry.condition.is_first]
    objectives = {entry.condition.objective for entry in first}
    if len(objectives) < 2:
        return
    for name, label in {entry.row.name: entry.row.label for entry in first if entry.row.name != REFERENCE}.items():
        own = [entry for entry in first if entry.row.name == name]
        if len(own) == len(objectives) and all(entry.status == REACHED for entry in own):
            steps, time = (mean_over([of.values for of in each]) for each in zip(*((e.steps, e.time) for e in own)))
            yield (
                f"{label}, mean over {len(own)} objectives: {steps.mean:.2f}{brackets(_interval(steps))} of Adam's "
                f"steps, {time.mean:.2f}{brackets(_interval(time))} of its time"
            )


def memory(rows: Sequence[Entry]) -> list[str]:
    """A line for each objective: the state of each optimizer under its first condition, and that over Adam's."""
    lines = []
    for objective in dict.fromkeys(entry.condition.objective for entry in rows if entry.condition.is_first):
        own = [entry for entry in rows if entry.condition == Condition(objective) and entry.state_bytes is not None]
        parts = {entry.row.name.removesuffix("_ema").removesuffix("_live"): entry for entry in reversed(own)}
        adam = parts[REFERENCE].state_bytes if REFERENCE in parts else None
        texts = [
            f"{entry.row.label} {entry.state_bytes / 1e6:.2f} MB"
            + (f" (×{entry.state_bytes / adam:.2f})" if adam else "")
            for entry in reversed(parts.values())
            if entry.state_bytes is not None
        ]
        lines.append(f"State of the optimizer, {title(objective).lower()}: {', '.join(texts)}")
    return lines


def _interval(value: Estimate) -> str:
    return estimate_text(value, "")[1]


def brackets(text: str) -> str:
    return f" ({text})" if text else ""
