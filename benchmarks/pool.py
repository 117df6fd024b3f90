"""Cells in processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.attempt import Run, attempt, train_cell
from benchmarks.machine import thread_limits, usable_cores
from benchmarks.sweep import Ended, Task

STOP_SECONDS = 20.0  # the longest that a worker may take to write a checkpoint


# Not joblib's workers: one that is killed fails the runs of all of them, and they are stopped without a checkpoint.
class Pool:
    """Up to `workers` processes, started when first needed, replaced when they die.

    Args:
        workers: default: as many as the usable cores have threads for.
        threads: of torch in each process: clocks are comparable only if all runs have the same share of the machine.
        run: what a worker does with a configuration and a directory; importable by name.
    """

    def __init__(self, workers: int | None = None, threads: int = 1, run: Run = train_cell) -> None:
        self.workers = max(1, usable_cores() // threads) if workers is None else workers
        if self.workers < 1:
            raise ValueError(f"workers={workers} given; at least 1 is required")
        self.threads, self.run = threads, run
        self._processes: list[_Worker] = []

    def start(self, cell: Task, directory: Path) -> None:
        self._processes = [worker for worker in self._processes if worker.cell or worker.process.is_alive()]
        free = next((worker for worker in self._processes if worker.cell is None), None)
        if free is None:
            assert len(self._processes) < self.workers
            free = _Worker(self.run, self.threads)
            self._processes.append(free)
        free.start(cell, directory)

    def collect(self, timeout: float) -> list[Ended]:
        busy = {worker.connection: worker for worker in self._processes if worker.cell}
        ready = wait(list(busy), timeout)
        return [worker.collect() for connection, worker in busy.items() if connection in ready]

    def close(self) -> None:
        for worker in self._processes:
            worker.stop()
        for worker in self._processes:
            worker.process.join(STOP_SECONDS)
            worker.process.kill()
        self._processes = []


class _Worker:
    """A process that runs one cell after another. Its death shows as the end of the connection."""

    def __init__(self, run: Run, threads: int) -> None:
        context = get_context("spawn")
        self.connection, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, run), daemon=True)
        with _inherited(threads):
            self.process.start()
        child.close()
        self.cell: Task | None = None
        self.directory = Path()

    def start(self, cell: Task, directory: Path) -> None:
        self.cell, self.directory = cell, directory
        with suppress(OSError):  # a worker that has just died is found dead by collect()
            self.connection.send((OmegaConf.to_container(cell.config), directory))

    def stop(self) -> None:
        if self.cell is None:
            self.connection.close()
        else:
            self.process.terminate()  # the run in progress writes a checkpoint first

    def collect(self) -> Ended:
        """What became of the cell, once the connection has something to say."""
        assert self.cell is not None
        cell, self.cell = self.cell, None
        try:
            return Ended(cell, *self.connection.recv())
        except (EOFError, OSError):
            return Ended(cell, None, self._cause_of_death())

    def _cause_of_death(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        hint = " (often: out of memory)" if code == -signal.SIGKILL else ""
        return f"The worker process died: {cause}{hint}. What it printed is in {self.directory.name}/log.txt.\n"


@contextmanager
def _inherited(threads: int) -> Iterator[None]:
    """What a worker that is started meanwhile has from its first moment, before it imports torch.

    Its number of threads; and that it ignores Ctrl-C, which reaches the whole process group: the parent ends it.
    """
    limits = thread_limits(threads)
    before = {name: os.environ.get(name) for name in limits}
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(limits)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(connection: Connection, run: Run) -> None:
    """The life of a worker: runs what it is sent, answers with what became of it."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        try:
            config, directory = connection.recv()
        except EOFError:
            return
        connection.send(attempt(run, config, directory))


def _exit_with_parent() -> None:
    """Ends a worker whose parent was killed: its run is left to be resumed, never to be run twice at once."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
