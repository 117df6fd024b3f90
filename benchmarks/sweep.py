"""Runs cells, many at once: skips the finished, resumes the killed, survives the crashed.

For any benchmark that is a set of training runs:

    cells = [Cell(f"width{w}", (f"model.width={w}", "preset=quick")) for w in (64, 128)]
    outcomes = run_cells(lambda known: cells, Path("results/widths/cells"), Pool())

`wanted(outcomes)` is asked again whenever a cell has ended, so that it can ask for more according to what is known.
Where cells run is the business of an executor: processes of this machine (`benchmarks.pool`) or jobs of a cluster
(`benchmarks.jobs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig

from benchmarks.attempt import only_user_of
from benchmarks.cells import Cell, Outcome, known_outcome

Outcomes = Mapping[Cell, Outcome]
POLL_SECONDS = 0.5


class Task(Protocol):
    """What an executor takes, a cell or the like. Hashable; ``config`` is plain values."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> DictConfig: ...


@dataclass(frozen=True)
class Running:
    """A cell in an executor. `started`: by time.monotonic()."""

    cell: Cell
    directory: Path
    started: float


@dataclass(frozen=True)
class Ended:
    """What an executor is done with: what the run returned, or None and the error."""

    cell: Task
    result: dict[str, Any] | None
    error: str = ""


class Executor(Protocol):
    """Where cells run. `workers`: how many at once."""

    workers: int

    def start(self, cell: Task, directory: Path) -> None:
        """Runs a cell in its directory, which is there; at most `workers` are started that have not ended."""

    def collect(self, timeout: float) -> list[Ended]:
        """The cells that have ended, each of them once; waits up to `timeout` seconds for one."""

    def close(self) -> None:
        """Stops what is running, such that it can be resumed."""


class Watcher(Protocol):
    """Is told what happens."""

    def ended(self, cell: Cell, outcome: Outcome, earlier: bool) -> None: ...
    def update(self, outcomes: Outcomes, running: Sequence[Running]) -> None: ...


def run_cells(
    wanted: Callable[[Outcomes], Sequence[Cell]],
    root: Path,
    executor: Executor,
    *,
    watcher: Watcher | None = None,
    fail_fast: bool = False,
    recorded: Mapping[str, Outcome] | None = None,
) -> dict[Cell, Outcome]:
    """Runs every cell that is wanted, each in its directory under `root`, and returns their outcomes.

    Args:
        wanted: from the outcomes so far, the cells wanted, the most urgent first; ended ones may be among them.
        executor: where they run; closed at the end.
        fail_fast: stop at the first crash (the other running cells can be resumed).
        recorded: outcomes known from elsewhere, by the keys of their configurations.
    """
    outcomes: dict[Cell, Outcome] = {}
    running: dict[Task, Running] = {}
    with only_user_of(root), closing(executor):
        while True:
            queue = [cell for cell in dict.fromkeys(wanted(outcomes)) if cell not in outcomes and cell not in running]
            begun = [cell for cell in _first_of(queue, outcomes) if cell not in running]
            earlier = _earlier(queue, root, recorded) or _earlier(begun, root, recorded)
            if not earlier:
                for cell in begun[: executor.workers - len(running)]:
                    running[cell] = _start(cell, cell.directory(root), executor)
                if not running:
                    return outcomes
            ended = earlier or _wait_for_some(executor, running, outcomes, watcher)
            outcomes |= ended
            for cell, outcome in ended.items():
                if watcher:
                    watcher.ended(cell, outcome, bool(earlier))
            if fail_fast and any(outcome.status == "crashed" for outcome in ended.values()):
                return outcomes


def _earlier(cells: Sequence[Cell], root: Path, recorded: Mapping[str, Outcome] | None) -> dict[Cell, Outcome]:
    return {cell: known for cell in cells if (known := known_outcome(cell, root, recorded))}


def _first_of(queue: Sequence[Cell], outcomes: Outcomes) -> list[Cell]:
    """Instead of cells that come after one that has not ended, that one."""
    return list(dict.fromkeys(cell.after if cell.after and cell.after not in outcomes else cell for cell in queue))


def _start(cell: Cell, directory: Path, executor: Executor) -> Running:
    directory.mkdir(parents=True, exist_ok=True)
    executor.start(cell, directory)
    return Running(cell, directory, time.monotonic())


def _wait_for_some(
    executor: Executor, running: dict[Task, Running], outcomes: Outcomes, watcher: Watcher | None
) -> dict[Cell, Outcome]:
    """The outcomes of the next cells to end, which are no longer among the running ones."""
    while True:
        if watcher:
            watcher.update(outcomes, list(running.values()))
        if ended := executor.collect(POLL_SECONDS):
            done = [(item, running.pop(item.cell)) for item in ended]
            return {run.cell: _outcome(item, run) for item, run in done}


def _outcome(ended: Ended, running: Running) -> Outcome:
    """Of a cell that has just ended; its error, if there is one, stands in its error.txt."""
    error_file = running.directory / "error.txt"
    seconds = time.monotonic() - running.started
    if ended.result is None:
        error_file.write_text(ended.error)
        return Outcome(running.directory, "crashed", seconds, {}, ended.error)
    error_file.unlink(missing_ok=True)
    return Outcome(running.directory, ended.result["status"], seconds, ended.result)
