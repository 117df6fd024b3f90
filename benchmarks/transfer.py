"""Which runs the sweep of learning rates over widths consists of.

A study is an objective with an optimizer. At each width seed 0 searches the best rate, from the one of the width
before; the further seeds are run around it. The rate that is best at the narrowest width is run at all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean

from benchmarks import bracket, optima
from benchmarks.cells import Cell
from benchmarks.ledger import averaged_loss
from benchmarks.optima import Optimum
from benchmarks.sweep import Outcomes
from splus import lr_from_adam


@dataclass(frozen=True)
class Study:
    """An objective with an optimizer, of which one setting is swept.

    Args:
        settings: of every run, as Hydra overrides.
        knob: the setting that is swept.
        start: its first value, at the narrowest width.
        seeds: how many, by width.
    """

    objective: str
    optimizer: str
    settings: tuple[str, ...]
    knob: str
    start: float
    seeds: Mapping[int, int]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted(self.seeds))

    def cell(self, width: int, index: int, seed: int) -> Cell:
        settings = (*self.settings, f"model.width={width}", f"{self.knob}={optima.rate(index)}", f"seed={seed}")
        name = f"{self.objective}-{self.optimizer}-width{width}-{optima.rate(index)}-seed{seed}"
        return Cell(name, settings, group=f"{self.objective}/{self.optimizer}/{width}")

    def loss(self, outcomes: Outcomes, width: int, seed: int, index: int) -> float | None:
        """Of the averaged weights.

        Raises:
            KeyError: the run has not ended.
        """
        return averaged_loss(outcomes[self.cell(width, index, seed)])

    def indices(self, outcomes: Outcomes, limit: int) -> dict[tuple[int, int], tuple[list[int], bool]]:
        """By width and seed, the indices to try as far as is known, and whether that is all of them."""
        found: dict[tuple[int, int], tuple[list[int], bool]] = {}
        start = optima.nearest_index(self.start)
        for width in self.widths:
            tried, over = optima.search(start, limit, partial(self.loss, outcomes, width, 0))
            found[width, 0] = tried, over
            if not over:
                break
            centre = bracket.best({index: self.loss(outcomes, width, 0, index) for index in tried})
            if centre is None:
                break
            start = centre
            for seed in range(1, self.seeds[width]):
                found[width, seed] = optima.further_indices(centre, limit, partial(self.loss, outcomes, width, seed))
        return found

    def optima(self, outcomes: Outcomes, limit: int) -> dict[int, Optimum]:
        """The best rate of every width whose runs have all ended."""
        indices, found = self.indices(outcomes, limit), {}
        for width in self.widths:
            own = [indices.get((width, seed), ([], False)) for seed in range(self.seeds[width])]
            if all(over for _, over in own):
                losses = [
                    {index: self.loss(outcomes, width, seed, index) for index in tried}
                    for seed, (tried, _) in enumerate(own)
                ]
                best = optima.optimum(losses)
                if best is not None:
                    found[width] = best
        return found

    def mean_loss(self, outcomes: Outcomes, width: int, index: int) -> float | None:
        """Over the seeds; None while one has not ended, NaN if one crashed."""
        try:
            losses = [self.loss(outcomes, width, seed, index) for seed in range(self.seeds[width])]
        except KeyError:
            return None
        return fmean(math.nan if loss is None else loss for loss in losses)

    def costs(self, outcomes: Outcomes, limit: int, width: int, best: int) -> dict[int, float]:
        """By index, the loss there over the loss at ``best``, less 1, over the seeds that ran both."""
        tried = {index for (at, _), (of, _) in self.indices(outcomes, limit).items() if at == width for index in of}
        losses: dict[int, dict[int, float]] = {}
        for index in sorted(tried | {best}):
            for seed in range(self.seeds[width]):
                cell = self.cell(width, index, seed)
                loss = averaged_loss(outcomes[cell]) if cell in outcomes else None
                if loss is not None:
                    losses.setdefault(index, {})[seed] = loss
        found, reference = {}, losses.get(best, {})
        for index, of_seeds in losses.items():
            common = of_seeds.keys() & reference.keys()
            if common:
                found[index] = fmean(of_seeds[s] for s in common) / fmean(reference[s] for s in common) - 1
        return found

    def transferred(self, found: dict[int, Optimum]) -> int | None:
        """The index of the rate that is best at the narrowest width."""
        first = found.get(self.widths[0])
        return None if first is None else first.index

    def wanted(self, outcomes: Outcomes, limit: int) -> list[Cell]:
        """All cells wanted now, the search of the widest first."""
        indices = self.indices(outcomes, limit)
        cells = [self.cell(width, index, seed) for (width, seed), (tried, _) in indices.items() for index in tried]
        found = self.optima(outcomes, limit)
        transferred = self.transferred(found)
        if transferred is not None:
            cells += [self.cell(width, transferred, seed) for width, seed in indices]
        return cells + [
            self.cell(width, best.index, seed) for width, best in found.items() for seed in range(self.seeds[width])
        ]


@dataclass(frozen=True)
class Conversion:
    """SPlus at the rate that :func:`splus.lr_from_adam` makes of the best one of Adam, both of one objective."""

    adam: Study
    splus: Study

    def indices(self, outcomes: Outcomes, limit: int) -> dict[int, int]:
        """By width, the index nearest to the converted rate, where both best rates are known."""
        from_adam, own = self.adam.optima(outcomes, limit), self.splus.optima(outcomes, limit)
        return {
            width: optima.nearest_index(lr_from_adam(2 ** from_adam[width].octaves, width))
            for width in own
            if width in from_adam
        }

    def wanted(self, outcomes: Outcomes, limit: int) -> list[Cell]:
        return [
            self.splus.cell(width, index, seed)
            for width, index in self.indices(outcomes, limit).items()
            for seed in range(self.splus.seeds[width])
        ]


@dataclass(frozen=True)
class Transfer:
    """The studies of a sweep; ``limit``: the most rates of a search."""

    studies: tuple[Study, ...]
    limit: int

    @cached_property
    def conversions(self) -> tuple[Conversion, ...]:
        """Of every objective on which both "adam" and "splus" are swept."""
        swept = {(study.objective, study.optimizer): study for study in self.studies}
        pairs = [
            (swept.get((objective, "adam")), study) for (objective, name), study in swept.items() if name == "splus"
        ]
        return tuple(Conversion(adam, splus) for adam, splus in pairs if adam)

    def wanted(self, outcomes: Outcomes) -> list[Cell]:
        """All cells wanted now, wide networks first: they take longest."""
        parts: tuple[Study | Conversion, ...] = (*self.studies, *self.conversions)
        cells = [cell for part in parts for cell in part.wanted(outcomes, self.limit)]
        return sorted(cells, key=lambda cell: -int(cell.group.rpartition("/")[2]))

    def expected(self, outcomes: Outcomes) -> Counter[str]:
        """How many cells each group will have, as far as one can tell: a search takes about 6, a further seed 3."""
        counts = Counter(cell.group for cell in dict.fromkeys(self.wanted(outcomes)))
        for study in self.studies:
            for width in study.widths:
                group = f"{study.objective}/{study.optimizer}/{width}"
                counts[group] = max(counts[group], 6 + 3 * (study.seeds[width] - 1))
        return counts

    def labels(self, cell: Cell) -> dict[str, object]:
        """What the list of runs says of a cell."""
        objective, optimizer, width = cell.group.split("/")
        knob, _, value = cell.overrides[-2].partition("=")
        return {
            "objective": objective,
            "optimizer": optimizer,
            "width": width,
            "setting": knob.lstrip("+"),
            "value": value,
            "seed": cell.config.seed,
        }
