"""What the commands that sweep over training runs have in common: how they begin and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape

from benchmarks.attempt import DirectoryInUse
from benchmarks.cells import Cell, Outcome, finished_earlier, made_by_other_code
from benchmarks.ledger import Ledger
from benchmarks.progress import Progress, summary
from benchmarks.sweep import Executor, Outcomes, run_cells
from train.config import build


class SettingError(ValueError):
    """A setting of the command that makes no sense."""


def run_command(work: Callable[[Console], int]) -> NoReturn:
    """Does the work and exits with its code; a stop and a mistake in the settings are said without a traceback."""
    console = Console()
    try:
        sys.exit(work(console))
    except KeyboardInterrupt:
        console.print("\nStopped. The same command continues from here.")
        sys.exit(130)
    except (SettingError, DirectoryInUse) as error:
        console.print(f"[red]Error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)


def executor_from(config: DictConfig, **given: Any) -> Executor:
    """Where the settings `launcher` and `workers` say that cells run, with other arguments if they are given.

    Raises:
        SettingError: not possible here.
    """
    try:
        executor: Executor = build(config.launcher, **{"workers": config.workers} | given)
    except ValueError as error:
        raise SettingError(error) from None
    return executor


class Plan(Protocol):
    """Which cells a sweep consists of."""

    def wanted(self, outcomes: Outcomes) -> list[Cell]: ...
    def expected(self, outcomes: Outcomes) -> Mapping[str, int]: ...


def swept(
    plan: Plan,
    labels: Callable[[Cell], Mapping[str, object]],
    config: DictConfig,
    executor: Executor,
    console: Console,
    opening: str,
    curves: bool = False,
) -> dict[Cell, Outcome]:
    """Says what is going to be run, and runs what of it is not in the runs.csv or the cells of ``config.output``.

    Args:
        labels: of a cell in runs.csv.
        config: has the settings `output`, `expected`, `fail_fast` and `report_only`.
        opening: what the sweep is about.
        curves: whether curves are kept beside runs.csv.
    """
    output = Path(config.output)
    with Progress(console, executor.workers, plan.expected) as progress:
        ledger = Ledger(output / "runs.csv", labels, progress, curves)
        earlier = finished_earlier(plan.wanted, output / "cells", ledger.known)
        console.print(
            f"{opening}\nExpected: {config.expected}; {executor.workers} run at once.\n"
            f"About {sum(plan.expected(earlier).values())} training runs, depending on the learning rates; "
            f"{len(earlier)} are finished already.\n"
            f"Results go to {output}. Stop at any time (Ctrl-C): the same command continues.",
            highlight=False,
            soft_wrap=True,
        )
        warn_of_other_code(earlier, console, delete=f"{output}/cells and their lines of {output}/runs.csv")
        if config.report_only:
            return earlier
        return run_cells(
            plan.wanted,
            output / "cells",
            executor,
            watcher=ledger,
            fail_fast=config.fail_fast,
            recorded=ledger.known,
        )


def warn_of_other_code(outcomes: Outcomes, console: Console, delete: str) -> None:
    """Says how many of the finished runs another version of the code has made, and what to delete to repeat them."""
    old = sum(made_by_other_code(outcome) for outcome in outcomes.values())
    if old:
        console.print(
            f"[yellow]{old} finished runs were made by another version of the code;[/] to repeat them, delete {delete}"
        )


def show_crashes(outcomes: Outcomes, console: Console) -> int:
    """A line for each run that crashed; the exit code, 1 if there is one."""
    crashed = [(cell, outcome) for cell, outcome in outcomes.items() if outcome.status == "crashed"]
    for cell, outcome in crashed:
        console.print(f"[red]✗[/] {cell.name} {escape(summary(outcome))}", highlight=False, soft_wrap=True)
    return int(bool(crashed))
