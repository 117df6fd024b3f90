"""SPlus against Adam, each at its best learning rate: how many of Adam's steps, and how much of its time, SPlus needs.

    python -m benchmarks.compare preset=quick        (settings: conf/comparison/)

Stop it whenever you like; the same command continues where it stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from benchmarks.cells import ROOT, finished_earlier
from benchmarks.command import SettingError, executor_from, run_command, show_crashes, warn_of_other_code
from benchmarks.comparison import OPTIMIZERS, Comparison
from benchmarks.progress import Progress
from benchmarks.sweep import Outcomes, run_cells
from benchmarks.table import (
    entries,
    headline,
    notes,
    terminal_tables,
    title,
    write_cells_csv,
    write_comparison_csv,
)


@hydra.main(config_path=str(ROOT / "conf" / "comparison"), config_name="compare", version_base="1.3")
def main(config: DictConfig) -> None:
    run_command(lambda console: compare(comparison_from(config), config, console))


def compare(comparison: Comparison, config: DictConfig, console: Console) -> int:
    """Runs the comparison and writes its table and report; the exit code, 1 if any run crashed."""
    executor = executor_from(config)
    output, workers = Path(config.output), executor.workers
    announce(comparison, config.expected, workers, output, console)
    with Progress(console, workers, comparison.expected) as progress:
        outcomes = run_cells(
            comparison.wanted, output / "cells", executor, watcher=progress, fail_fast=config.fail_fast
        )
    return conclude(comparison, outcomes, config, workers, output, console)


def comparison_from(config: DictConfig) -> Comparison:
    """The comparison that the configuration asks for."""
    unknown = [name for name in config.objectives if name not in config.start]
    if unknown or not config.objectives:
        raise SettingError(f"objectives={config.objectives} given; choose among {', '.join(map(str, config.start))}")
    for name, least in {"seeds": 1, "rates": 1, "workers": 1}.items():
        if config[name] is not None and config[name] < least:
            raise SettingError(f"{name}={config[name]} given; at least {least} is required")
    start = {o: {k: float(config.start[o][k]) for k in OPTIMIZERS} for o in config.objectives}
    for objective, rates in start.items():
        for optimizer, rate in rates.items():
            if not rate > 0:
                raise SettingError(f"start.{objective}.{optimizer}={rate} given; a positive rate is required")
    return Comparison(
        preset=config.preset,
        objectives=tuple(config.objectives),
        start=start,
        limit=config.rates,
        seeds=config.seeds,
        overrides=tuple(config.overrides),
    )


def announce(comparison: Comparison, expected: str, workers: int, output: Path, console: Console) -> None:
    """Says what is going to be run, how long it takes and how much of it is there already."""
    outcomes = finished_earlier(comparison.wanted, output / "cells")
    total = sum(comparison.expected(outcomes).values())
    console.print(
        f"SPlus against Adam on {', '.join(map(title, comparison.objectives)).lower()} (preset {comparison.preset}).\n"
        f"Expected: {expected}; {workers} runs at once.\n"
        f"About {total} training runs, depending on the learning rates; {len(outcomes)} are finished already.\n"
        f"Results go to {output}. Stop at any time (Ctrl-C): the same command continues.",
        highlight=False,
        soft_wrap=True,
    )
    warn_of_other_code(outcomes, console, delete=str(output))


def conclude(
    comparison: Comparison,
    outcomes: Outcomes,
    config: DictConfig,
    workers: int,
    output: Path,
    console: Console,
) -> int:
    """Writes the CSVs, figures and report, prints the table; the exit code."""
    from benchmarks.report import write_report  # workers import this module: they need no matplotlib

    rows = entries(comparison, outcomes)
    write_comparison_csv(rows, output / "comparison.csv")
    write_cells_csv(outcomes, output / "cells.csv")
    for table in terminal_tables(rows):
        console.print(table, "")
    for line in [*notes(rows), *headline(rows)]:
        console.print(line, highlight=False, soft_wrap=True)
    settings = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))
    report = write_report(comparison, rows, outcomes, output, {**settings, "workers": workers})
    code = show_crashes(outcomes, console)
    console.print(f"Report: {report.resolve()}", highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
