"""What each choice of SPlus is worth: the same runs with one thing changed, on the three objectives.

    python -m benchmarks.ablation                                     (settings and variants: conf/ablation/)
    python -m benchmarks.ablation objectives=[language_modelling] variants=[published,default]

One seed and one learning rate for all variants of SPlus: differences of a hundredth are noise. Stop it whenever you
like; the same command continues where it stopped.
"""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from benchmarks.cells import ROOT, Cell, Outcome
from benchmarks.command import executor_from, run_command, show_crashes
from benchmarks.csv_file import write_csv
from benchmarks.progress import Progress
from benchmarks.sweep import run_cells

# Which weights of a run are scored: SPlus's own averages, or the best of those kept beside Adam.
AVERAGED = "averaged"


@hydra.main(config_path=str(ROOT / "conf" / "ablation"), config_name="ablation", version_base="1.3")
def main(config: DictConfig) -> None:
    run_command(lambda console: ablate(config, console))


def ablate(config: DictConfig, console: Console) -> int:
    """Run every variant on every objective; print and write the table. The exit code, 1 if a run crashed."""
    cells = wanted_cells(config)
    executor = executor_from(config)
    console.print(f"{len(cells)} runs, {config.expected}; they can be stopped and continued.", highlight=False)
    runs_of_each = dict.fromkeys(config.objectives, len(config.variants))
    with Progress(console, executor.workers, lambda _: runs_of_each) as progress:
        outcomes = run_cells(
            lambda _: list(cells.values()),
            Path(config.output) / "cells",
            executor,
            watcher=progress,
            fail_fast=config.fail_fast,
        )
    failed = show_crashes(outcomes, console)
    if len(outcomes) < len(cells):  # it has stopped at a crash
        return failed
    rows = table_rows(config, {key: outcomes[cell] for key, cell in cells.items()})
    write_csv(rows, Path(config.output) / "ablation.csv")
    console.print(terminal_table(config, rows))
    console.print(f"Written to {config.output}/ablation.csv")
    return failed


def wanted_cells(config: DictConfig) -> dict[tuple[str, str], Cell]:
    """The runs, by variant and objective."""
    unknown = set(config.variants) - set(config.known)
    if unknown:
        raise ValueError(f"variants={sorted(unknown)} are unknown; known are {', '.join(config.known)}")
    return {
        (variant, objective): Cell(
            f"{objective}-{variant}",
            (
                f"objective={objective}",
                *config.common,
                *config.per_objective[objective],
                *settings(config, variant, objective),
            ),
            group=objective,
        )
        for variant in config.variants
        for objective in config.objectives
    }


def settings(config: DictConfig, variant: str, objective: str) -> list[str]:
    of = config.known[variant]
    return list(of[objective] if isinstance(of, DictConfig) else of)


def table_rows(config: DictConfig, outcomes: dict[tuple[str, str], Outcome]) -> list[dict[str, str | float]]:
    """A row for each variant and objective: losses, and seconds a step over those of the first variant."""
    rows: list[dict[str, str | float]] = []
    for (variant, objective), outcome in outcomes.items():
        first = outcomes[config.variants[0], objective]
        averages = [AVERAGED] if AVERAGED in outcome.result.get("final", {}) else outcome.averages()
        rows.append(
            {
                "variant": variant,
                "objective": objective,
                "status": outcome.status,
                "live": outcome.loss("live"),
                "averaged": min((outcome.loss(weights) for weights in averages), default=float("inf")),
                "time": seconds_per_step(outcome) / seconds_per_step(first),
            }
        )
    return rows


def seconds_per_step(outcome: Outcome) -> float:
    """Of the training clock; NaN for a run that crashed."""
    return outcome.result["seconds"] / max(outcome.result["step"], 1) if outcome.result else float("nan")


def terminal_table(config: DictConfig, rows: list[dict[str, str | float]]) -> Table:
    """A line a variant: for each objective the loss of the averaged weights (of the live ones), and the time a step."""
    table = Table("variant", *config.objectives, caption="averaged (live) loss, time a step over the first variant's")
    for variant in config.variants:
        cells = []
        for objective in config.objectives:
            row = next(row for row in rows if row["variant"] == variant and row["objective"] == objective)
            values = f"{row['averaged']:.4f} ({row['live']:.4f})  {row['time']:.2f}"
            cells.append(values if row["status"] == "finished" else str(row["status"]))
        table.add_row(variant, *cells)
    return table


if __name__ == "__main__":
    main()
