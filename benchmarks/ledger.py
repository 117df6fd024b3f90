"""The finished runs of a benchmark as a CSV file, which stands for their directories once those are gone.

A line a run: its configuration's key, how it ended, the losses, and by which code, versions and machine. A run whose
key is in the file is not run again, so that a sweep goes on where its committed file ends.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.cells import Cell, Outcome, code_digest
from benchmarks.machine import processor
from benchmarks.sweep import Outcomes, Running, Watcher

FIELDS = ("key", "status", "steps", "seconds", "live_loss", "averaged_loss", "code", "torch", "machine")


def averaged_loss(outcome: Outcome) -> float | None:
    """Final loss of the optimizer's averages or the best kept beside it; infinite if diverged, None if crashed."""
    if outcome.status == "crashed":
        return None
    final = outcome.result.get("final", {})
    names = [name for name in final if name != "live"]
    return min((outcome.loss(name) for name in names), default=outcome.loss("live"))


class Ledger:
    """A sweep's watcher that writes every run that ends into ``path`` and tells another watcher.

    Args:
        labels: what to write of a cell in the first columns, always under the same names.
    """

    def __init__(self, path: Path, labels: Callable[[Cell], Mapping[str, object]], watcher: Watcher) -> None:
        self.path, self.labels, self.watcher = path, labels, watcher
        self.known = read(path)

    def ended(self, cell: Cell, outcome: Outcome, earlier: bool) -> None:
        if outcome.status != "crashed" and cell.hash not in self.known:
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
            "code": code_digest(),
            "torch": metadata.version("torch"),
            "machine": processor(),
        }
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)


def read(path: Path) -> dict[str, Outcome]:
    """The outcomes in a ledger, by the keys of their configurations."""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        return {row["key"]: _outcome(row, path) for row in csv.DictReader(file)}


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
