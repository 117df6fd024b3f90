"""The progress display of a sweep: a line for each cell that has ended, and below it what is running."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from benchmarks.cells import Cell, Outcome, last_metrics
from benchmarks.sweep import Outcomes, Running

SIGNS = {"finished": "[green]✓[/]", "diverged": "[yellow]↗[/]", "crashed": "[red]✗[/]"}


class Progress:
    """Watches a sweep. `expected(outcomes)`: the number of cells there will be in all, by group.

    On a terminal what is running is shown live; elsewhere (a log file, CI) only cells that have ended are printed.
    """

    def __init__(self, console: Console, workers: int, expected: Callable[[Outcomes], Mapping[str, int]]) -> None:
        self.console, self.workers, self.expected = console, workers, expected
        self.earlier = 0
        self._expected: tuple[int, Mapping[str, int]] = (-1, {})  # at so many outcomes: it takes a while to tell
        self.live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def ended(self, cell: Cell, outcome: Outcome, earlier: bool) -> None:
        self.earlier += earlier
        if not earlier:
            self.console.print(
                f"{SIGNS[outcome.status]} {escape(cell.name)}  {escape(summary(outcome))}",
                highlight=False,
                soft_wrap=True,
            )

    def update(self, outcomes: Outcomes, running: Sequence[Running]) -> None:
        if self.live is None:
            return
        table = Table.grid(padding=(0, 2))
        parts = []
        for item in running:
            step, loss = last_metrics(item.directory)
            steps = max(1, int(item.cell.config["steps"]))
            parts.append(step / steps)
            shown = "–" if loss is None else f"{loss:.3f}"
            table.add_row(
                item.cell.name, ProgressBar(steps, step, width=10), f"{step}/{steps}", f"loss {shown}",
                f"{time.monotonic() - item.started:.0f} s",
            )  # fmt: skip
        if self._expected[0] != len(outcomes):
            self._expected = (len(outcomes), self.expected(outcomes))
        expected = self._expected[1]
        total = sum(expected.values())
        left = seconds_left(expected, outcomes, running, parts) / self.workers
        line = f"{len(outcomes)} of about {total} runs finished"
        line += f" ({self.earlier} earlier)" if self.earlier else ""
        line += f", about {duration(left)} left" if outcomes else ""
        whole = Table.grid(padding=(0, 2))
        whole.add_row(ProgressBar(total, len(outcomes) + sum(parts), width=20), line)
        self.live.update(Group(table, whole))


def summary(outcome: Outcome) -> str:
    """What a run came to, in one line."""
    if outcome.status == "crashed":
        last = outcome.error.strip().splitlines()[-1]
        return f"crashed: {last} (see {outcome.directory / 'error.txt'})"
    if outcome.status == "diverged":
        return f"diverged at step {outcome.result['step']}"
    losses = (f"{name} {outcome.loss(name):.4f}" for name in outcome.result["final"])
    return ", ".join(losses) + f"  {outcome.seconds:.0f} s"


def seconds_left(
    expected: Mapping[str, int], outcomes: Outcomes, running: Sequence[Running], parts: Sequence[float]
) -> float:
    """Seconds of work that remain, from the mean time of the runs of each group that have finished (else of all).

    Args:
        parts: how far each running cell is, 0 to 1.
    """
    done = Counter[str](cell.group for cell in outcomes)
    seconds = [(cell.group, o.seconds) for cell, o in outcomes.items() if o.status == "finished"]
    left = 0.0
    for group, count in expected.items():
        own = [value for name, value in seconds if name == group] or [value for _, value in seconds] or [0.0]
        begun = sum(part for item, part in zip(running, parts) if item.cell.group == group)
        left += max(0.0, count - done[group] - begun) * fmean(own)
    return left


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
