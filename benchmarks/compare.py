"""SPlus against Adam and others, each at its best learning rate: how many of Adam's steps and how much of its time.

    python -m benchmarks.compare preset=quick        (settings: conf/comparison/)

Stop it whenever you like; the same command continues where it stopped, also when nothing is left but the runs.csv and
curves.jsonl of the output directory.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from benchmarks.cells import ROOT, Cell, finished_earlier
from benchmarks.command import SettingError, executor_from, run_command, show_crashes, warn_of_other_code
from benchmarks.comparison import REFERENCE, Comparison, Condition, Study, Training
from benchmarks.ledger import Ledger
from benchmarks.methods import Method, method
from benchmarks.progress import Progress
from benchmarks.summary import headline, memory, write_details, write_differences, write_summary
from benchmarks.sweep import Outcomes, run_cells
from benchmarks.table import entries, notes, terminal_tables, title

SETTINGS = "comparison.yaml"


@hydra.main(config_path=str(ROOT / "conf" / "comparison"), config_name="compare", version_base="1.3")
def main(config: DictConfig) -> None:
    run_command(lambda console: compare(config, console))


def compare(config: DictConfig, console: Console) -> int:
    """Runs the comparison and writes its tables and report; the exit code, 1 if any run crashed."""
    comparison, executor = comparison_from(config), executor_from(config)
    output = Path(config.output)
    with Progress(console, executor.workers, comparison.expected) as progress:
        ledger = Ledger(output / "runs.csv", labels, progress, curves=True)
        earlier = finished_earlier(comparison.wanted, output / "cells", ledger.known)
        announce(comparison, config, earlier, executor.workers, console)
        if config.report_only:
            return conclude(comparison, earlier, config, executor.workers, console)
        outcomes = run_cells(
            comparison.wanted,
            output / "cells",
            executor,
            watcher=ledger,
            fail_fast=config.fail_fast,
            recorded=ledger.known,
        )
    return conclude(comparison, outcomes, config, executor.workers, console)


def comparison_from(config: DictConfig) -> Comparison:
    """The comparison that the configuration asks for.

    Raises:
        SettingError: a setting makes no sense.
    """
    known = sorted(path.stem for path in (ROOT / "conf" / "objective").glob("*.yaml"))
    if not config.objectives or set(config.objectives) - set(known):
        raise SettingError(f"objectives={config.objectives} given; choose among {', '.join(known)}")
    for name, least in {"seeds": 1, "rates": 1, "workers": 1}.items():
        if config[name] is not None and config[name] < least:
            raise SettingError(f"{name}={config[name]} given; at least {least} is required")
    training = training_from(config)
    studies: dict[tuple[Condition, str], Study] = {}
    for objective in config.objectives:
        for name in config.only:
            if name not in config.parts:
                raise SettingError(
                    f"only={name} given; the parts of this preset are {', '.join(map(str, config.parts))}"
                )
            for study in studies_of(config.parts[name], config, objective, training):
                origin = studies.get((Condition(objective), study.method.name))
                studies.setdefault(study.key, study if study.condition.is_first else study.after(origin))
    return Comparison(tuple(studies.values()))


def training_from(config: DictConfig) -> Training:
    return Training(
        preset=config.training,
        settings_of_all=(*config.settings, *config.overrides),
        starts={str(name): float(steps) for name, steps in config.starts.items()},
        start_rates=method(REFERENCE, config.objectives, {}).start,
        root=Path(config.output).absolute() / "cells",
    )


def studies_of(part: DictConfig, config: DictConfig, objective: str, training: Training) -> Iterator[Study]:
    """Of one part of the configuration and one objective: every method under every condition."""
    variants: Any = OmegaConf.to_container(config.variants, resolve=True)
    for start in part.get("starts", ["initialisation"]):
        if start not in ("initialisation", *config.starts):
            raise SettingError(
                f"starts: {start} given; choose among initialisation, {', '.join(map(str, config.starts))}"
            )
        for schedule in part.get("schedules", ["constant"]):
            for batch in part.get("batches", [1]):
                for name in part.optimizers:
                    yield Study(
                        condition=Condition(objective, str(start), str(schedule), float(batch)),
                        method=with_own_start(method(str(name), config.objectives, variants), config),
                        training=training,
                        limit=part.get("rates", config.rates),
                        seeds=part.get("seeds", config.seeds),
                        searched=part.get("searched", True),
                        budgets=tuple(map(float, part.get("budgets", []))),
                    )


def with_own_start(of: Method, config: DictConfig) -> Method:
    """The method with the first learning rates that the command gives instead of its own."""
    given: Mapping[str, Any] = config.first_rates
    strange = [
        f"{objective}.{name}" for objective, rates in given.items() for name in rates if objective not in of.start
    ]
    if strange:
        raise SettingError(f"first_rates.{strange[0]} given; first_rates.<objective>.<optimizer> is required")
    own = {o: float(rates[of.name]) for o, rates in given.items() if of.name in rates}
    if any(not rate > 0 for rate in own.values()):
        raise SettingError(f"first_rates of {of.name}: {own} given; positive rates are required")
    return of.starting_at(own)


def labels(cell: Cell) -> dict[str, object]:
    """What the list of runs says of a cell."""
    config, (condition, optimizer) = cell.config, cell.group.split("/")
    return {
        "run": cell.name, "condition": condition, "optimizer": optimizer,
        "learning_rate": config.optimizer.lr, "seed": config.seed, "batch_size": config.batch_size,
    }  # fmt: skip


def announce(comparison: Comparison, config: DictConfig, earlier: Outcomes, workers: int, console: Console) -> None:
    """Says what is going to be run, how long it takes and how much of it is there already."""
    console.print(
        f"{config.title} on {', '.join(map(title, comparison.objectives)).lower()} (preset {config.preset}).\n"
        f"Expected: {config.expected}; this machine runs {workers} at once.\n"
        f"About {sum(comparison.expected(earlier).values())} training runs, depending on the learning rates; "
        f"{len(earlier)} are finished already.\n"
        f"Results go to {config.output}. Stop at any time (Ctrl-C): the same command continues.",
        highlight=False,
        soft_wrap=True,
    )
    warn_of_other_code(earlier, console, delete=f"{config.output}/cells and their lines of {config.output}/runs.csv")


def conclude(comparison: Comparison, outcomes: Outcomes, config: DictConfig, workers: int, console: Console) -> int:
    """Writes the CSVs, figures and report, prints the tables; the exit code."""
    from benchmarks.report import Results, provenance, write_report  # workers import this module: no matplotlib there

    output = Path(config.output)
    rows = entries(comparison, outcomes)
    write_summary(rows, training_from(config), output / "summary.csv")
    write_details(rows, output / "details.csv")
    write_differences(rows, output / "differences.csv")
    command = shlex.join(["python", "-m", "benchmarks.compare", *(a for a in sys.argv[1:] if a != "report_only=true")])
    (output / SETTINGS).write_text(f"# {command}\n{OmegaConf.to_yaml(config, resolve=True)}")
    for table in terminal_tables(rows):
        console.print(table, "")
    for line in [*notes(rows), *memory(rows), *headline(rows)]:
        console.print(line, highlight=False, soft_wrap=True)
    facts = {**provenance(output, outcomes), "Workers": f"{workers} runs at once"}
    results = Results(output, config, comparison, outcomes, rows, command, facts)
    report = write_report([results], output / "report.html")
    code = show_crashes(outcomes, console)
    console.print(f"Report: {report.resolve()}", highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
