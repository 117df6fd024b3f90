"""The finished runs of a benchmark as a CSV file, which stands for their directories once those are gone.

A line a run: its configuration's key, how it ended, the losses, and by which code, versions and machine. A run whose
key is in the file is not run again, so that a sweep goes on where its committed file ends. Where curves are wanted too,
a file of JSON lines beside it has those and all that was measured, by the same keys.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Outcome, origin, present_origin
from benchmarks.sweep import Outcomes, Running, Watcher

CURVES = "curves.jsonl"
DIGITS = 9  # of the numbers of curves; those of fp32 are whole


def averaged_loss(outcome: Outcome) -> float | None:
    """Final loss of the optimizer's averages or the best kept beside it; infinite if diverged, None if crashed."""
    if outcome.status == "crashed":
        return None
    return min(map(outcome.loss, outcome.averages()), default=outcome.loss("live"))


class Ledger:
    """A sweep's watcher that writes every run that ends into ``path`` and tells another watcher.

    Args:
        labels: what to write of a cell in the first columns, always under the same names.
        curves: whether the curves are kept too.
    """

    def __init__(
        self, path: Path, labels: Callable[[Cell], Mapping[str, object]], watcher: Watcher, curves: bool = False
    ) -> None:
        self.path, self.labels, self.watcher, self.curves = path, labels, watcher, curves
        self.known = read(path, curves)

    def ended(self, cell: Cell, outcome: Outcome, earlier: bool) -> None:
        if outcome.status != "crashed" and cell.hash not in self.known:
            if self.curves:
                self._write_curves(cell, outcome)
            self._write(cell, outcome)
            self.known[cell.hash] = outcome
        self.watcher.ended(cell, outcome, earlier)

    def update(self, outcomes: Outcomes, running: Sequence[Running]) -> None:
        self.watcher.update(outcomes, running)

    def _write(self, cell: Cell, outcome: Outcome) -> None:
        row = dict(self.labels(cell)) | {
            "key": cell.hash,
            "status": outcome.status,
            "steps": outcome.result["step"],
            "seconds": f"{outcome.result['seconds']:.2f}",
            "live_loss": repr(outcome.loss("live")),
            "averaged_loss": repr(averaged_loss(outcome)),
            **(present_origin() | origin(outcome.directory)),
        }
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)

    def _write_curves(self, cell: Cell, outcome: Outcome) -> None:
        curves = {
            weights: [curve.steps, *([_short(value) for value in values] for values in (curve.seconds, curve.losses))]
            for weights, curve in outcome.curves.items()
        }
        about = {name: value for name, value in outcome.result.items() if name not in ("status", "step", "seconds")}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_name(CURVES), "a") as file:
            file.write(json.dumps({"key": cell.hash, **about, "curves": curves}) + "\n")


def _short(value: float) -> float | None:
    """With few digits; numbers that JSON lacks become null."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def read(path: Path, curves: bool = False) -> dict[str, Outcome]:
    """The outcomes in a ledger, by the keys of their configurations; with curves, those alone that have them."""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        found = {row["key"]: _outcome(row, path) for row in csv.DictReader(file)}
    if not curves:
        return found
    kept = _read_curves(path.with_name(CURVES))
    return {key: replace(o, result=o.result | kept[key]) for key, o in found.items() if key in kept}


def _read_curves(path: Path) -> dict[str, dict[str, Any]]:
    """What is kept of each run beside its line; a last line that was cut short is left out."""
    found = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            about = json.loads(line)
            for curve in about["curves"].values():
                curve[2] = [math.nan if loss is None else loss for loss in curve[2]]
            found[about.pop("key")] = about
    return found


def _outcome(row: Mapping[str, str], path: Path) -> Outcome:
    final = {"live": {"loss": float(row["live_loss"])}, "averaged": {"loss": float(row["averaged_loss"])}}
    seconds = float(row["seconds"])
    result = {
        "status": row["status"],
        "step": int(row["steps"]),
        "seconds": seconds,
        "final": final if row["status"] == "finished" else {},
        "code": row["code"],
    }
    return Outcome(path.parent / row["key"], row["status"], seconds, result)
