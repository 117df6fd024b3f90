"""How far a learning rate that is tuned on a narrow network is from the best one of a wide network.

    python -m benchmarks.lr_transfer preset=quick        (settings: conf/transfer/)

For each objective and optimizer, the best learning rate at every width, its drift in octaves per doubling of the
width, and what it costs to train a width with the rate that was best at the narrowest. Stop it whenever you like; the
same command continues where it stopped, also when nothing is left but the runs.csv of the output directory.
"""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from benchmarks.cells import ROOT
from benchmarks.command import SettingError, executor_from, run_command, show_crashes, swept
from benchmarks.sweep import Outcomes
from benchmarks.transfer import Study, Transfer
from benchmarks.transfer_table import (
    conversions,
    results,
    terminal_tables,
    write_conversions,
    write_optima,
    write_slopes,
)


@hydra.main(config_path=str(ROOT / "conf" / "transfer"), config_name="lr_transfer", version_base="1.3")
def main(config: DictConfig) -> None:
    run_command(lambda console: measure(transfer_from(config), config, console))


def transfer_from(config: DictConfig) -> Transfer:
    """The sweeps that the configuration asks for.

    Raises:
        SettingError: a study of an optimizer that is not known, or without a width.
    """
    studies = []
    for key in config.only:
        if key not in config.studies:
            raise SettingError(f"only={key} is no study; studies are {', '.join(map(str, config.studies))}")
        of = config.studies[key]
        for name in of.optimizers:
            if name not in config.known:
                raise SettingError(f"optimizer {name} is unknown; known are {', '.join(map(str, config.known))}")
            if not of.widths:
                raise SettingError(f"studies.{key}.widths is empty; at least one width is required")
            known, seeds = config.known[name], of.get("seeds", config.seeds)
            settings = (f"preset={config.training}", f"objective={of.objective}", *config.overrides, *known.settings)
            studies.append(
                Study(
                    objective=of.objective,
                    optimizer=str(name),
                    settings=settings,
                    knob=known.get("knob", "optimizer.lr"),
                    start=float(known.start),
                    seeds={int(width): of.get("seeds_at", {}).get(width, seeds) for width in of.widths},
                )
            )
    return Transfer(tuple(studies), config.rates)


def measure(transfer: Transfer, config: DictConfig, console: Console) -> int:
    """Runs the sweeps and writes CSVs, figure and report; the exit code, 1 if any run crashed."""
    executor = executor_from(config)
    opening = f"The best learning rate against width, for {len(transfer.studies)} pairs of objective and optimizer."
    outcomes = swept(transfer, transfer.labels, config, executor, console, opening)
    return conclude(transfer, outcomes, config, executor.workers, Path(config.output), console)


def conclude(
    transfer: Transfer, outcomes: Outcomes, config: DictConfig, workers: int, output: Path, console: Console
) -> int:
    """Writes the CSVs, the figure and the report, prints the tables; the exit code."""
    from benchmarks.transfer_report import write_report  # workers import this module: they need no matplotlib

    found = results(transfer, outcomes)
    write_optima(found, output / "optima.csv")
    write_slopes(found, output / "slopes.csv")
    converted = conversions(transfer, outcomes)
    write_conversions(converted, output / "conversion.csv")
    for table in terminal_tables(found, converted):
        console.print(table, "")
    report = write_report(
        transfer, found, converted, outcomes, output, workers, OmegaConf.to_yaml(config, resolve=True)
    )
    code = show_crashes(outcomes, console)
    console.print(f"Report: {report.resolve()}", highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
