"""Which runs a comparison of optimizers consists of.

A study is a method under a condition: objective, weights it starts from, schedule of the learning rate, batch size. Its
learning rate is searched with seed 0; the best rate of each of its rows is then run with the other seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from benchmarks import bracket
from benchmarks.cells import Cell, Outcome, compose_config
from benchmarks.methods import AVERAGED, Method, Row
from benchmarks.sweep import Outcomes

REFERENCE = "adam"  # the row whose final loss is to be reached
INITIALISATION, CONSTANT = "initialisation", "constant"


@dataclass(frozen=True)
class Condition:
    """What all methods of a table have in common. ``batch``: in units of the batch size of the training preset."""

    objective: str
    start: str = INITIALISATION
    schedule: str = CONSTANT
    batch: float = 1.0

    @property
    def is_first(self) -> bool:
        """Whether it is the one in which other conditions of the objective find their first learning rate."""
        return self == Condition(self.objective)

    @property
    def name(self) -> str:
        batch = "" if self.batch == 1 else f"batch{self.batch:g}"
        others = (part for part in (self.start, self.schedule) if part not in (INITIALISATION, CONSTANT))
        return "-".join(part for part in (self.objective, *others, batch) if part)


@dataclass(frozen=True)
class Choice:
    """The learning rate of a row.

    Attributes:
        index: on the grid; None if no run gave a finite loss.
        weights: those of the row; of averages, the best.
        note: why the rate is not bracketed.
    """

    index: int | None
    weights: str
    bracketed: bool
    note: str = ""


@dataclass(frozen=True)
class Training:
    """What all runs have in common.

    Attributes:
        preset: of conf/preset/.
        settings_of_all: further settings.
        starts: the steps of an Adam run whose weights training can start from, by name, in units of the run's own.
        start_rates: that run's learning rate by objective.
        root: the directory of the cells.
    """

    preset: str
    settings_of_all: tuple[str, ...]
    starts: Mapping[str, float]
    start_rates: Mapping[str, float]
    root: Path

    def settings(self, objective: str) -> tuple[str, ...]:
        return (f"objective={objective}", f"preset={self.preset}", *self.settings_of_all)

    def size(self, objective: str, name: str, factor: float) -> int:
        """A number of the preset, such as its steps, times a factor."""
        return max(1, round(factor * int(compose_config(self.settings(objective))[name])))

    def start(self, objective: str, name: str) -> Cell:
        """The Adam run whose weights are the starting point of this name, with another seed than any that follows."""
        steps = self.size(objective, "steps", self.starts[name])
        lr = bracket.rate(bracket.nearest_index(self.start_rates[objective]))
        settings = (
            *self.settings(objective), f"schedule={CONSTANT}", f"optimizer={REFERENCE}", f"optimizer.lr={lr}",
            f"steps={steps}", f"evaluate_every={steps}", f"seed={START_SEED}", "keep_checkpoint=true",
        )  # fmt: skip
        return Cell(f"{objective}-start-{name}", settings, group=f"{objective}/start")


START_SEED = 1000
EVERY_RUN_DIVERGED = "every run diverged"


@dataclass(frozen=True)
class Study:
    """A method under a condition.

    Attributes:
        limit: the most learning rates.
        seeds: of each row at its best rate.
        searched: whether rates are searched, from the first one on; otherwise ``limit`` of them around it are run.
        budgets: shorter runs of the best rates, in units of the steps, for schedules that are judged at their end.
        origin: the study whose best rate is the first one here.
    """

    condition: Condition
    method: Method
    training: Training
    limit: int
    seeds: int
    searched: bool = True
    budgets: tuple[float, ...] = ()
    origin: Study | None = None

    @property
    def group(self) -> str:
        return f"{self.condition.name}/{self.method.name}"

    def cell(self, index: int, seed: int, budget: float = 1.0) -> Cell:
        condition, training = self.condition, self.training
        lr = bracket.rate(index)
        settings = [*training.settings(condition.objective), f"schedule={condition.schedule}", *self.method.settings]
        if condition.batch != 1:
            settings.append(f"batch_size={training.size(condition.objective, 'batch_size', condition.batch)}")
        if budget != 1:
            settings.append(f"steps={training.size(condition.objective, 'steps', budget)}")
        after = None
        if condition.start != INITIALISATION:
            after = training.start(condition.objective, condition.start)
            settings += [f"start.directory={after.directory(training.root)}", f"start.key={after.hash}"]
        shorter = "" if budget == 1 else f"-budget{budget:g}"
        name = f"{condition.name}-{self.method.name}-lr{lr}-seed{seed}{shorter}"
        return Cell(name, (*settings, f"optimizer.lr={lr}", f"seed={seed}"), self.group, after)

    def first_index(self, outcomes: Outcomes) -> int | None:
        """Of the learning rates; None while it is not known."""
        if self.origin is not None:
            if not self.origin.search(outcomes).finished:
                return None
            index = self.origin.choice(self.method.rows[0], outcomes).index
            if index is not None:
                return index
        return bracket.nearest_index(self.method.start[self.condition.objective])

    def search(self, outcomes: Outcomes) -> bracket.Search:
        first = self.first_index(outcomes)
        if first is None:
            return bracket.Search((), finished=False)

        def losses_at(index: int) -> tuple[float | None, ...] | None:
            outcome = outcomes.get(self.cell(index, seed=0))
            return None if outcome is None else tuple(final_loss(outcome, row.weights) for row in self.method.rows)

        if self.searched:
            return bracket.search(first, self.limit, losses_at)
        grid = range(first - (self.limit - 1) // 2, first + self.limit // 2 + 1)
        indices = tuple(sorted(grid, key=lambda index: abs(index - first)))
        return bracket.Search(indices, all(losses_at(index) is not None for index in indices))

    def swept(self, row: Row, outcomes: Outcomes) -> dict[int, float | None]:
        """Final loss of a row's weights at every rate tried so far, seed 0; None where the run crashed."""
        cells = {index: self.cell(index, seed=0) for index in self.search(outcomes).indices}
        return {index: final_loss(outcomes[c], row.weights) for index, c in sorted(cells.items()) if c in outcomes}

    def choice(self, row: Row, outcomes: Outcomes) -> Choice:
        """The learning rate, and of averages the decay, with the lowest final loss of seed 0."""
        losses = self.swept(row, outcomes)
        index = bracket.best(losses)
        if index is None:
            return Choice(
                None, row.weights, False, EVERY_RUN_DIVERGED if math.inf in losses.values() else "no run has ended"
            )
        weights = best_weights(outcomes[self.cell(index, seed=0)], row.weights)
        if bracket.is_bracketed(losses):
            return Choice(index, weights, True)
        note = f"limit of {self.limit} rates" if len(losses) >= self.limit else "the search was stopped"
        if any(index + side in losses and losses[index + side] is None for side in (-1, 1)):
            note = "a neighbour crashed"
        return Choice(index, weights, False, note)

    def seed_cells(self, row: Row, outcomes: Outcomes, budget: float = 1.0) -> list[Cell]:
        """The runs of a row at its best rate, seed 0 first."""
        index = self.choice(row, outcomes).index
        return [] if index is None else [self.cell(index, seed, budget) for seed in range(self.seeds)]

    def wanted(self, outcomes: Outcomes) -> list[Cell]:
        """All cells wanted now."""
        search = self.search(outcomes)
        cells = [self.cell(index, seed=0) for index in search.indices]
        if search.finished:
            for budget in (1.0, *self.budgets):
                for row in self.method.rows:
                    cells += self.seed_cells(row, outcomes, budget)
        return list(dict.fromkeys(cells))


@dataclass(frozen=True)
class Comparison:
    """The studies of a comparison, in the order of its tables."""

    studies: tuple[Study, ...]

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(dict.fromkeys(study.condition for study in self.studies))

    @property
    def training(self) -> Training:
        return self.studies[0].training

    @property
    def objectives(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(condition.objective for condition in self.conditions))

    def under(self, condition: Condition) -> tuple[Study, ...]:
        return tuple(study for study in self.studies if study.condition == condition)

    def rows(self, condition: Condition) -> Iterator[tuple[Study, Row]]:
        for study in self.under(condition):
            for row in study.method.rows:
                yield study, row

    def wanted(self, outcomes: Outcomes) -> list[Cell]:
        """All cells wanted now: first one of each search, then the searches, then further seeds; longest first."""
        first: list[Cell] = []
        others: list[Cell] = []
        for study in self.studies:
            cells = study.wanted(outcomes)
            first += cells[:1]
            others += cells[1:]

        def longest_first(cells: Sequence[Cell]) -> list[Cell]:
            seconds = {cell.group: seconds_of_group(cell.group, outcomes) or math.inf for cell in cells}
            return sorted(cells, key=lambda cell: -seconds[cell.group])

        return list(dict.fromkeys(first + longest_first(others)))

    def expected(self, outcomes: Outcomes) -> Counter[str]:
        """How many cells each group will have, as far as one can tell: an unfinished search takes about one more."""
        counts: Counter[str] = Counter()
        for study in self.studies:
            cells, search = study.wanted(outcomes), study.search(outcomes)
            counts[study.group] = len(cells)
            if not search.finished:
                known = max(3, len(search.indices) + 1) if study.searched else study.limit
                shorter = study.seeds * len(study.budgets)
                counts[study.group] = min(known, study.limit) + study.seeds - 1 + shorter
            for cell in cells:
                if cell.after is not None:
                    counts[cell.after.group] = len(study.training.starts)
        return counts


def labels(cell: Cell) -> dict[str, object]:
    """What the list of runs says of a cell."""
    config, (condition, optimizer) = cell.config, cell.group.split("/")
    return {
        "run": cell.name, "condition": condition, "optimizer": optimizer,
        "learning_rate": config.optimizer.lr, "seed": config.seed, "batch_size": config.batch_size,
    }  # fmt: skip


def final_loss(outcome: Outcome, weights: str) -> float | None:
    """Final validation loss, of the best averages for "averaged"; infinite if diverged, None if crashed."""
    if outcome.status == "crashed":
        return None
    return outcome.loss(best_weights(outcome, weights))


def best_weights(outcome: Outcome, weights: str) -> str:
    """The name of the best averages for "averaged"."""
    names = outcome.averages() if weights == AVERAGED else []
    return min(names, key=outcome.loss, default=weights)


def seconds_of_group(group: str, outcomes: Outcomes) -> float | None:
    """Mean seconds that the finished cells of a group took."""
    seconds = [o.seconds for cell, o in outcomes.items() if cell.group == group and o.status == "finished"]
    return fmean(seconds) if seconds else None
