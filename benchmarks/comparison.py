"""Which runs the comparison of SPlus with Adam consists of.

For each objective and optimizer the learning rate is searched with seed 0; the best rate of each row of the table
is then run with the other seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks import bracket
from benchmarks.cells import Cell, Outcome
from benchmarks.sweep import Outcomes


@dataclass(frozen=True)
class Row:
    """One row of the table: an optimizer evaluated with one set of its weights.

    `chosen_on`: the weights whose final loss chooses the learning rate; "ema_*" is the best of the averaging decays.
    """

    label: str
    optimizer: str
    weights: str
    chosen_on: str


ADAM = Row("Adam", "adam", "live", "live")
ADAM_EMA = Row("Adam + EMA", "adam", "ema_*", "ema_*")
SPLUS = Row("SPlus", "splus", "averaged", "averaged")
SPLUS_LIVE = Row("SPlus (live)", "splus", "live", "averaged")
ROWS = (ADAM, ADAM_EMA, SPLUS, SPLUS_LIVE)
OPTIMIZERS = ("adam", "splus")


@dataclass(frozen=True)
class Choice:
    """The learning rate of a row.

    `index`: on the grid; None if no run gave a finite loss. `note`: why it is not bracketed.
    """

    index: int | None
    weights: str
    bracketed: bool
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The runs of the comparison. `start`: first learning rate by objective and optimizer; `limit`: most rates each."""

    preset: str
    objectives: tuple[str, ...]
    start: dict[str, dict[str, float]]
    limit: int
    seeds: int
    overrides: tuple[str, ...] = ()

    def cell(self, objective: str, optimizer: str, index: int, seed: int) -> Cell:
        lr = bracket.rate(index)
        settings = (
            f"objective={objective}", f"optimizer={optimizer}", f"preset={self.preset}",
            *self.overrides, f"optimizer.lr={lr}", f"seed={seed}",
        )  # fmt: skip
        return Cell(f"{objective}-{optimizer}-lr{lr}-seed{seed}", settings, group=f"{objective}/{optimizer}")

    def search(self, objective: str, optimizer: str, outcomes: Outcomes) -> bracket.Search:
        rows = [row for row in ROWS if row.optimizer == optimizer and row.weights == row.chosen_on]

        def losses_at(index: int) -> tuple[float | None, ...] | None:
            outcome = outcomes.get(self.cell(objective, optimizer, index, seed=0))
            return None if outcome is None else tuple(final_loss(outcome, row.chosen_on) for row in rows)

        start = bracket.nearest_index(self.start[objective][optimizer])
        return bracket.search(start, self.limit, losses_at)

    def swept(self, objective: str, row: Row, outcomes: Outcomes) -> dict[int, float | None]:
        """Final loss of a row's weights at every rate tried so far, seed 0; None where the run crashed."""
        cells = {
            index: self.cell(objective, row.optimizer, index, seed=0)
            for index in self.search(objective, row.optimizer, outcomes).indices
        }
        return {index: final_loss(outcomes[c], row.weights) for index, c in sorted(cells.items()) if c in outcomes}

    def choice(self, objective: str, row: Row, outcomes: Outcomes) -> Choice:
        """The learning rate, and for Adam's averages the decay, with the lowest final loss of seed 0."""
        judge = next(other for other in ROWS if (other.optimizer, other.weights) == (row.optimizer, row.chosen_on))
        losses = self.swept(objective, judge, outcomes)
        index = bracket.best(losses)
        if index is None:
            return Choice(None, row.weights, False, "no run ended with a finite loss")
        weights = row.weights
        if weights == "ema_*":
            outcome = outcomes[self.cell(objective, row.optimizer, index, seed=0)]
            weights = min(outcome.averages(), key=outcome.loss)
        if bracket.is_bracketed(losses):
            return Choice(index, weights, True)
        note = "the search was stopped" if len(losses) < self.limit else f"limit of {self.limit} rates"
        if any(index + side in losses and losses[index + side] is None for side in (-1, 1)):
            note = "a neighbour crashed"
        return Choice(index, weights, False, note)

    def seed_cells(self, objective: str, row: Row, outcomes: Outcomes) -> list[Cell]:
        """The runs of a row at its best rate, seed 0 first."""
        index = self.choice(objective, row, outcomes).index
        if index is None:
            return []
        return [self.cell(objective, row.optimizer, index, seed) for seed in range(self.seeds)]

    def wanted(self, outcomes: Outcomes) -> list[Cell]:
        """All cells wanted now: first one of each search, then the searches, then further seeds; longest first."""
        first: list[Cell] = []
        searches: list[Cell] = []
        seeds: list[Cell] = []
        for objective in self.objectives:
            for optimizer in OPTIMIZERS:
                search = self.search(objective, optimizer, outcomes)
                cells = [self.cell(objective, optimizer, index, seed=0) for index in search.indices]
                first += cells[:1]
                searches += cells[1:]
                if search.finished:
                    for row in ROWS:
                        if row.optimizer == optimizer:
                            seeds += self.seed_cells(objective, row, outcomes)[1:]

        def longest_first(cells: Sequence[Cell]) -> list[Cell]:
            return sorted(cells, key=lambda cell: -(seconds_of_group(cell.group, outcomes) or math.inf))

        return list(dict.fromkeys(first + longest_first(searches) + longest_first(seeds)))

    def expected(self, outcomes: Outcomes) -> Counter[str]:
        """How many cells each group will have, as far as one can tell: an unfinished search takes about one more."""
        counts = Counter(cell.group for cell in self.wanted(outcomes))
        for objective in self.objectives:
            for optimizer in OPTIMIZERS:
                search = self.search(objective, optimizer, outcomes)
                if not search.finished:
                    counts[f"{objective}/{optimizer}"] += (len(search.indices) < self.limit) + self.seeds - 1
        return counts


def final_loss(outcome: Outcome, weights: str) -> float | None:
    """Final validation loss; of the best decay for "ema_*"; infinite if diverged, None if crashed."""
    if outcome.status == "crashed":
        return None
    if weights == "ema_*":
        return min((outcome.loss(name) for name in outcome.averages()), default=math.inf)
    return outcome.loss(weights)


def seconds_of_group(group: str, outcomes: Outcomes) -> float | None:
    """Mean seconds that the finished cells of a group took."""
    seconds = [o.seconds for cell, o in outcomes.items() if cell.group == group and o.status == "finished"]
    return fmean(seconds) if seconds else None
