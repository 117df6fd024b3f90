"""The clocks that runs are judged by: how long the steps of each method take, measured side by side.

Clocks of runs that take place at different times are not comparable: on a shared machine the same step took 0.17 to
0.24 s within an hour. So the methods of an objective and a batch size take turns for some steps. What counts of a turn
is its ratio to the reference's turn beside it, which other load on the machine lengthens alike; these ratios times the
reference's median step are the clock of every run of the method, wherever and whenever that took place.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape

from benchmarks import bracket
from benchmarks.cells import Cell, Outcome, present_origin
from benchmarks.comparison import REFERENCE, Comparison, Condition, Study
from benchmarks.csv_file import write_csv
from benchmarks.sweep import Executor, Outcomes
from benchmarks.turns import Trial, run_alone

FILE = "paces.csv"
DIGITS = 6  # of the numbers in it
STEADY = 50  # the last steps of a trial, whose pace is that of all later ones: five of most optimizers' refresh periods

Course = tuple[str, float]  # what the steps' cost depends on beside the method: objective and batch size


@dataclass(frozen=True)
class Pace:
    """The clock of a method.

    Attributes:
        steps: at the ends of its turns.
        seconds: of training until then.
        averages: of keeping one average beside the optimizer until then.
    """

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    averages: tuple[float, ...]

    def at(self, step: int, weights: str) -> float:
        """Seconds until a step is done, with those of the average if ``weights`` are one that the loop keeps."""
        kept = weights.startswith("ema_")
        return _at(step, self.steps, self.seconds) + (_at(step, self.steps, self.averages) if kept else 0.0)

    def retimed(self, outcome: Outcome) -> Outcome:
        """A run with its curves on this clock."""
        curves = {
            weights: [curve.steps, tuple(self.at(step, weights) for step in curve.steps), curve.losses]
            for weights, curve in outcome.curves.items()
        }
        return replace(outcome, result=outcome.result | {"curves": curves})


def _at(step: int, steps: Sequence[int], seconds: Sequence[float]) -> float:
    """Between the ends of turns in proportion; after the last one at the pace of the last STEADY steps."""
    ends, times = (0, *steps), (0.0, *seconds)
    if step <= ends[-1]:
        return float(np.interp(step, ends, times))
    begin = max(i for i, end in enumerate(ends[:-1]) if end <= max(0, ends[-1] - STEADY))
    return times[-1] + (step - ends[-1]) * (times[-1] - times[begin]) / (ends[-1] - ends[begin])


def relative(seconds: Any, training: Any) -> np.ndarray:
    """Of seconds [round][turn][run], those over the reference's training beside it: [turn][run], medians of rounds."""
    return np.median(np.array(seconds) / np.array(training)[:, :, :1], axis=0)


def reference_step(trial: Trial, result: Mapping[str, Any]) -> float:
    """Median seconds of a step of the reference."""
    lengths = np.diff([0, *trial.ends])
    return float(np.median(np.array(result["training"])[:, :, 0] / lengths))


def pace(trial: Trial, result: Mapping[str, Any], run: int, step_seconds: float) -> Pace:
    """Of one of the runs that took turns, in units in which a step of the reference takes ``step_seconds``."""
    lengths = np.diff([0, *trial.ends])
    clocks = [
        np.cumsum(relative(result[name], result["training"])[:, run] * lengths * step_seconds).tolist()
        for name in ("training", "averages")
    ]
    return Pace(tuple(trial.ends), *map(tuple, clocks))


def full_trials(comparison: Comparison, setting: DictConfig) -> dict[Course, Trial]:
    """For each course the trial of all its methods, at the learning rates where their searches begin."""
    methods: dict[Course, dict[str, Study]] = {}
    for study in comparison.studies:
        course = (study.condition.objective, study.condition.batch)
        first = replace(study, condition=Condition(course[0], batch=course[1]), origin=None)
        methods.setdefault(course, {}).setdefault(study.method.name, first)
    trials = {}
    for (objective, batch), of in methods.items():
        named = {
            name: study.cell(bracket.nearest_index(study.method.start[objective]), 0) for name, study in of.items()
        }
        reference = named.get(REFERENCE, next(iter(named.values())))
        steps = min(setting.steps, reference.config.steps)
        cells = tuple(dict.fromkeys((reference, *named.values())))
        trials[objective, batch] = Trial(
            f"{Condition(objective, batch=batch).name}-turns", cells, steps, setting.turn, setting.rounds
        )
    return trials


def measure(comparison: Comparison, config: DictConfig, alone: Callable[[], Executor], console: Console) -> bool:
    """Has the methods take turns that have not done so yet, and keeps their paces; whether all went well.

    Args:
        config: has the settings `output` and `pace`.
        alone: makes an executor of one worker that runs :func:`~benchmarks.turns.take_turns`.
    """
    if not config.pace.rounds:
        return True
    path = Path(config.output) / FILE
    _warn_of_other_origin(path, console)
    good = True
    for trial in full_trials(comparison, config.pace).values():
        known = read(path)
        reference = trial.cells[0]
        missing = [cell for cell in trial.cells if trial.key(cell) not in known]
        if not missing:
            continue
        trial = replace(trial, cells=tuple(dict.fromkeys((reference, *missing))))
        told = f"{len(trial.cells)} optimizers take turns for their clocks, {trial.steps * trial.rounds} steps of each"
        console.print(f"{trial.name}: {told}", highlight=False)
        directory = Path(config.output) / "turns" / f"{trial.name}-{trial.hash}"
        ended = run_alone(trial, directory, alone())
        if ended.result is None:
            (directory / "error.txt").write_text(ended.error)
            last = ended.error.strip().splitlines()[-1]
            console.print(f"[red]✗[/] {trial.name}: {escape(last)} (see {escape(str(directory))})", soft_wrap=True)
            good = False
            continue
        before = known.get(trial.key(reference))
        step_seconds = before.seconds[-1] / trial.steps if before else reference_step(trial, ended.result)
        found = {cell: pace(trial, ended.result, run, step_seconds) for run, cell in enumerate(trial.cells)}
        write(path, trial, {cell: found[cell] for cell in missing}, ended.result["made_by"])
    return good


def _warn_of_other_origin(path: Path, console: Console) -> None:
    present = present_origin()
    other = {line["key"] for line in _lines(path) if line | present != line}
    if other:
        console.print(
            f"[yellow]{len(other)} clocks were measured with other code or torch or on another processor;[/] to repeat "
            f"them, delete {path}"
        )


def write(path: Path, trial: Trial, found: Mapping[Cell, Pace], made_by: Mapping[str, str]) -> None:
    """Adds the paces of some methods of a trial to a file, a line for each turn."""
    lines = [
        {
            **dict(zip(("condition", "optimizer"), cell.group.split("/"))), "key": trial.key(cell), "step": step,
            "seconds": seconds, "averages_seconds": averages,
            **made_by,
        }
        for cell, of in found.items()
        for step, seconds, averages in zip(of.steps, of.seconds, of.averages)
    ]  # fmt: skip
    write_csv([*_lines(path), *lines], path, DIGITS)


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read(path: Path) -> dict[str, Pace]:
    """The paces in a file, by their keys; none if there is no file."""
    turns: dict[str, list[tuple[int, float, float]]] = {}
    for line in _lines(path):
        times = int(line["step"]), float(line["seconds"]), float(line["averages_seconds"])
        turns.setdefault(line["key"], []).append(times)
    return {key: Pace(*map(tuple, zip(*sorted(of)))) for key, of in turns.items()}


def timed_studies(comparison: Comparison, config: DictConfig) -> dict[str, Pace]:
    """The clocks of studies, by their groups. Those of a course of which some method has none are not among them."""
    known = read(Path(config.output) / FILE)
    trials = full_trials(comparison, config.pace) if known and config.pace.rounds else {}
    paces: dict[str, Pace] = {}
    for study in comparison.studies:
        trial = trials.get((study.condition.objective, study.condition.batch))
        if trial and all(trial.key(cell) in known for cell in trial.cells):
            of = next(cell for cell in trial.cells if cell.group.partition("/")[2] == study.method.name)
            paces[study.group] = known[trial.key(of)]
    return paces


def on_common_clocks(outcomes: Outcomes, comparison: Comparison, config: DictConfig) -> dict[Cell, Outcome]:
    """Runs with their curves on the clocks of their methods, on their own where they have none."""
    paces = timed_studies(comparison, config)
    return {
        cell: paces[cell.group].retimed(outcome) if cell.group in paces and outcome.status != "crashed" else outcome
        for cell, outcome in outcomes.items()
    }


def clocks(comparison: Comparison, config: DictConfig) -> str:
    """Whose clocks the runs have, for people."""
    paces, setting = timed_studies(comparison, config), config.pace
    own = [c.name for c in comparison.conditions if not all(study.group in paces for study in comparison.under(c))]
    if len(own) == len(comparison.conditions):
        return "each run's own"
    together = f"{setting.steps} steps of each optimizer, in turns of {setting.turn}, {setting.rounds} times: {FILE}"
    return together + (f"; each run's own: {', '.join(own)}" if own else "")
