"""SPlus against Adam and others, each at its best learning rate: how many of Adam's steps and how much of its time.

    python -m benchmarks.compare preset=quick        (settings: conf/comparison/)

Stop it whenever you like; the same command continues where it stopped, also when nothing is left but the runs.csv and
curves.jsonl of the output directory.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from benchmarks.cells import ROOT
from benchmarks.command import SettingError, executor_from, run_command, show_crashes, swept
from benchmarks.comparison import (
    CONSTANT,
    INITIALISATION,
    REFERENCE,
    Comparison,
    Condition,
    Study,
    Training,
    labels,
)
from benchmarks.methods import Method, method
from benchmarks.pace import clocks, measure, on_common_clocks
from benchmarks.summary import headline, memory, write_details, write_differences, write_summary
from benchmarks.sweep import Outcomes
from benchmarks.table import entries, notes, terminal_tables, title
from benchmarks.turns import take_turns

SETTINGS = "comparison.yaml"
PART = ("optimizers", "starts", "schedules", "batches", "budgets", "seeds", "rates", "searched")
VARIANT = ("optimizer", "settings", "label", "sweep")
LEAST = {"seeds": 1, "rates": 1, "workers": 1, "pace.steps": 1, "pace.turn": 1, "pace.rounds": 0}


@hydra.main(config_path=str(ROOT / "conf" / "comparison"), config_name="compare", version_base="1.3")
def main(config: DictConfig) -> None:
    run_command(lambda console: compare(config, console))


def compare(config: DictConfig, console: Console) -> int:
    """Runs the comparison and writes its tables and report; the exit code, 1 if any run crashed."""
    comparison, executor = comparison_from(config), executor_from(config)
    opening = f"{config.title} on {', '.join(map(title, comparison.objectives)).lower()} (preset {config.preset})."
    outcomes = swept(comparison, labels, config, executor, console, opening, curves=True)
    timed = config.report_only or measure(
        comparison, config, lambda: executor_from(config, workers=1, run=take_turns), console
    )
    outcomes = on_common_clocks(outcomes, comparison, config)
    code = conclude(comparison, outcomes, config, executor.workers, console)
    return code or int(not timed)


def comparison_from(config: DictConfig) -> Comparison:
    """The comparison that the configuration asks for.

    Raises:
        SettingError: a setting makes no sense.
    """
    known = sorted(path.stem for path in (ROOT / "conf" / "objective").glob("*.yaml"))
    if not config.objectives or set(config.objectives) - set(known):
        raise SettingError(f"objectives={config.objectives} given; choose among {', '.join(known)}")
    for name, least in LEAST.items():
        given = OmegaConf.select(config, name)
        if given is not None and given < least:
            raise SettingError(f"{name}={given} given; at least {least} is required")
    methods = methods_from(config)
    training = training_from(config)
    studies: dict[tuple[Condition, str], Study] = {}
    for objective, name in product(config.objectives, config.only):
        part = config.parts[name]
        for condition, optimizer in product(conditions_of(part, config, objective), part.optimizers):
            origin = None if condition.is_first else studies.get((Condition(objective), optimizer))
            study = Study(
                condition, methods[optimizer], training,
                limit=part.get("rates", config.rates), seeds=part.get("seeds", config.seeds),
                searched=part.get("searched", True), budgets=tuple(map(float, part.get("budgets", []))), origin=origin,
            )  # fmt: skip
            studies.setdefault((condition, optimizer), study)
    return Comparison(tuple(studies.values()))


def methods_from(config: DictConfig) -> dict[str, Method]:
    """The methods of all parts that are run, by name.

    Raises:
        SettingError: a part, a file or a variant is not there, or first rates are of something else.
    """
    unknown = [str(name) for name in config.only if name not in config.parts]
    if unknown:
        raise SettingError(f"only={unknown[0]} given; the parts of this preset are {', '.join(map(str, config.parts))}")
    check_keys("parts", config.parts, PART)
    check_keys("variants", config.variants, VARIANT)
    variants: Any = OmegaConf.to_container(config.variants, resolve=True)
    names = dict.fromkeys(str(name) for part in config.only for name in config.parts[part].optimizers)
    for objective, rates in config.first_rates.items():
        for name in rates:
            if objective not in config.objectives or name not in names:
                raise SettingError(
                    f"first_rates.{objective}.{name} given; first_rates.<objective>.<optimizer> of a study is required"
                )
    return {name: method(name, config.objectives, variants, config.first_rates) for name in names}


def check_keys(setting: str, named: DictConfig, known: Sequence[str]) -> None:
    """Raise SettingError for a key of ``setting`` that nothing would read."""
    for name, of in named.items():
        for key in of:
            if key not in known:
                raise SettingError(f"{setting}.{name!s}.{key!s} given; choose among {', '.join(known)}")


def training_from(config: DictConfig) -> Training:
    return Training(
        preset=config.training,
        settings_of_all=(*config.settings, *config.overrides),
        starts={str(name): float(steps) for name, steps in config.starts.items()},
        start_rates=method(REFERENCE, config.objectives, {}).start,
        root=Path(config.output) / "cells",
    )


def conditions_of(part: DictConfig, config: DictConfig, objective: str) -> list[Condition]:
    """Of one part of the configuration and one objective."""
    starts = [str(start) for start in part.get("starts", [INITIALISATION])]
    known = (INITIALISATION, *map(str, config.starts))
    if set(starts) - set(known):
        raise SettingError(f"starts: {', '.join(starts)} given; choose among {', '.join(known)}")
    schedules, batches = part.get("schedules", [CONSTANT]), part.get("batches", [1])
    return [
        Condition(objective, start, str(of), float(batch)) for start, of, batch in product(starts, schedules, batches)
    ]


def conclude(comparison: Comparison, outcomes: Outcomes, config: DictConfig, workers: int, console: Console) -> int:
    """Writes the CSVs, figures and report, prints the tables; the exit code."""
    from benchmarks.report import Results, provenance, write_report  # workers import this module: no matplotlib there

    output = Path(config.output)
    rows = entries(comparison, outcomes)
    write_summary(rows, comparison.training, output / "summary.csv")
    write_details(rows, output / "details.csv")
    write_differences(rows, output / "differences.csv")
    command = shlex.join(["python", "-m", "benchmarks.compare", *(a for a in sys.argv[1:] if a != "report_only=true")])
    (output / SETTINGS).write_text(f"# {command}\n{OmegaConf.to_yaml(config, resolve=True)}")
    for table in terminal_tables(rows):
        console.print(table, "")
    for line in [*notes(rows), *memory(rows), *headline(rows)]:
        console.print(line, highlight=False, soft_wrap=True)
    facts = {**provenance(output, outcomes, clocks(comparison, config)), "Workers": f"{workers} runs at once"}
    results = Results(output, config, comparison, outcomes, rows, command, facts)
    report = write_report([results], output / "report.html")
    code = show_crashes(outcomes, console)
    console.print(f"Report: {report.resolve()}", highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    main()
