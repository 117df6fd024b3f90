"""Runs cells in parallel processes: skips the finished, resumes the killed, survives the crashed.

For any benchmark that is a set of training runs:

    cells = [Cell(f"width{w}", (f"model.width={w}", "preset=quick")) for w in (64, 128)]
    outcomes = run_cells(lambda known: cells, Path("results/widths/cells"), workers=usable_cores())

`wanted(outcomes)` is asked again whenever a cell has ended, so that it can ask for more according to what is known.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from benchmarks.cells import Cell, Outcome, code_digest, known_outcome

Outcomes = Mapping[Cell, Outcome]
Run = Callable[[DictConfig, Path], dict[str, Any]]
POLL_SECONDS = 0.5
STOP_SECONDS = 20.0  # the longest that a worker may take to write a checkpoint


class DirectoryInUse(RuntimeError):
    """Another sweep is running in the directory."""


class Watcher(Protocol):
    """Is told what happens."""

    def ended(self, cell: Cell, outcome: Outcome, earlier: bool) -> None: ...
    def update(self, outcomes: Outcomes, running: Sequence[Running]) -> None: ...


@dataclass(frozen=True)
class Running:
    """A cell in a worker. `started`: by time.monotonic()."""

    cell: Cell
    directory: Path
    started: float


def train_cell(config: DictConfig, directory: Path) -> dict[str, Any]:
    """One run of the training harness."""
    from train.loop import run

    result: dict[str, Any] = run(config, directory, progress=False)
    return result


def run_cells(
    wanted: Callable[[Outcomes], Sequence[Cell]],
    root: Path,
    workers: int,
    *,
    watcher: Watcher | None = None,
    fail_fast: bool = False,
    recorded: Mapping[str, Outcome] | None = None,
    run: Run = train_cell,
) -> dict[Cell, Outcome]:
    """Runs every cell that is wanted, each in its directory under `root`, and returns their outcomes.

    Args:
        wanted: from the outcomes so far, the cells wanted, the most urgent first; ended ones may be among them.
        workers: number of processes, one torch thread each.
        fail_fast: stop at the first crash (the other running cells can be resumed).
        recorded: outcomes known from elsewhere, by the keys of their configurations.
        run: what a worker does with a configuration and a directory; importable by name.
    """
    if workers < 1:
        raise ValueError(f"workers={workers} given; at least 1 is required")
    outcomes: dict[Cell, Outcome] = {}
    with only_user_of(root), _Pool(workers, run) as pool:
        while True:
            running = {worker.running.cell for worker in pool.busy()}
            queue = [cell for cell in dict.fromkeys(wanted(outcomes)) if cell not in outcomes and cell not in running]
            earlier = {cell: known for cell in queue if (known := known_outcome(cell, root, recorded))}
            if not earlier:
                for cell in queue[: workers - len(running)]:
                    pool.start(cell, cell.directory(root))
                if not pool.busy():
                    return outcomes
            ended = earlier or _wait_for_one(pool, outcomes, watcher)
            outcomes |= ended
            for cell, outcome in ended.items():
                if watcher:
                    watcher.ended(cell, outcome, bool(earlier))
            if fail_fast and any(outcome.status == "crashed" for outcome in ended.values()):
                return outcomes


def _wait_for_one(pool: _Pool, outcomes: Outcomes, watcher: Watcher | None) -> dict[Cell, Outcome]:
    while True:
        if watcher:
            watcher.update(outcomes, [worker.running for worker in pool.busy()])
        if ended := pool.collect(POLL_SECONDS):
            return ended


@contextmanager
def only_user_of(root: Path) -> Iterator[None]:
    """Holds a lock on `root`: two sweeps in one directory would write over each other's runs."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(
                f"{root} is in use by another running sweep; wait for it to end, or give another output directory"
            ) from None
        yield


class _Worker:
    """A process that runs one cell after another. Its death shows as the end of the connection."""

    def __init__(self, run: Run) -> None:
        context = get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, run), daemon=True)
        # Ctrl-C reaches the whole process group: the workers inherit that they ignore it, and the parent ends them
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, before)
        child.close()
        self._running: Running | None = None

    @property
    def idle(self) -> bool:
        return self._running is None

    @property
    def running(self) -> Running:
        assert self._running is not None
        return self._running

    def start(self, cell: Cell, directory: Path) -> None:
        self._running = Running(cell, directory, time.monotonic())
        with suppress(OSError):  # a worker that has just died is found dead by collect()
            self.connection.send((OmegaConf.to_container(cell.config), directory))

    def stop(self) -> None:
        if self.idle:
            self.connection.close()
        else:
            self.process.terminate()  # the run in progress writes a checkpoint first

    def collect(self) -> tuple[Cell, Outcome]:
        """The outcome of the cell, once the connection has something to say."""
        running, self._running = self.running, None
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError):
            result, error = None, self._cause_of_death(running.directory)
        status = "crashed" if result is None else result["status"]
        error_file = running.directory / "error.txt"
        if result is None:
            error_file.write_text(error)
        else:
            error_file.unlink(missing_ok=True)
        seconds = time.monotonic() - running.started
        return running.cell, Outcome(running.directory, status, seconds, result or {}, error)

    def _cause_of_death(self, directory: Path) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        return f"The worker process died: {cause}{hint}. What it printed is in {directory.name}/log.txt.\n"


class _Pool:
    """Up to `size` workers, started when first needed, replaced when they die, ended on exit."""

    def __init__(self, size: int, run: Run) -> None:
        self.size, self.run = size, run
        self.workers: list[_Worker] = []

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            worker.process.join(STOP_SECONDS)
            worker.process.kill()

    def busy(self) -> list[_Worker]:
        return [worker for worker in self.workers if not worker.idle]

    def start(self, cell: Cell, directory: Path) -> None:
        self.workers = [worker for worker in self.workers if not worker.idle or worker.process.is_alive()]
        free = next((worker for worker in self.workers if worker.idle), None)
        if free is None:
            assert len(self.workers) < self.size
            free = _Worker(self.run)
            self.workers.append(free)
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "code.txt").exists():
            (directory / "code.txt").write_text(code_digest() + "\n")
        free.start(cell, directory)

    def collect(self, timeout: float) -> dict[Cell, Outcome]:
        """The cells that have ended, waiting up to `timeout` seconds for one."""
        ready = wait([worker.connection for worker in self.busy()], timeout)
        return dict(worker.collect() for worker in self.busy() if worker.connection in ready)


def _serve(connection: Connection, run: Run) -> None:
    """The life of a worker: runs what it is sent, answers with (result, None) or (None, traceback)."""
    import torch

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # clocks are comparable only if all runs have the same share of the machine
    while True:
        try:
            config, directory = connection.recv()
        except EOFError:
            return
        _print_to(directory / "log.txt")
        try:
            connection.send((run(OmegaConf.create(config), directory), None))
        except Exception:
            connection.send((None, traceback.format_exc()))


def _exit_with_parent() -> None:
    """Ends a worker whose parent was killed: its run is left to be resumed, never to be run twice at once."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _print_to(path: Path) -> None:
    """Sends what this process prints, also from C, to a file: the terminal belongs to the progress display."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
