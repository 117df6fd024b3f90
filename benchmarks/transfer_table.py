"""What a sweep over widths found: its numbers, on the terminal and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Column, Table

from benchmarks.optima import PER_OCTAVE, Optimum, Slope, drift, rate
from benchmarks.sweep import Outcomes
from benchmarks.transfer import Study, Transfer
from splus import lr_from_adam

OPTIMA = (
    *("objective", "optimizer", "width", "best_lr", "best_lr_low", "best_lr_high"),
    *("bracketed", "best_loss", "transfer_loss"),
)
CONVERSIONS = ("objective", "width", "adam_lr", "converted_lr", "best_lr", "converted_loss", "best_loss")
SLOPES = ("objective", "optimizer", "slope", "slope_low", "slope_high")


@dataclass(frozen=True)
class Result:
    """One study.

    ``optima`` by width; ``best``: by width the loss at the rate nearest to it, and ``transfer``: at the one that is
    best at the narrowest width, both the mean over all seeds, once they have run. ``costs``: by width and grid index
    what the loss is above the one of the best, as a fraction, over the seeds that ran both.
    """

    study: Study
    optima: dict[int, Optimum]
    best: dict[int, float]
    transfer: dict[int, float]
    costs: dict[int, dict[int, float]]
    slope: Slope | None

    def cost(self, width: int) -> float | None:
        """What the transferred rate loses against the width's own best, as a fraction of its loss."""
        transferred, best = self.transfer.get(width), self.best.get(width)
        return None if transferred is None or best is None else transferred / best - 1


def results(transfer: Transfer, outcomes: Outcomes) -> list[Result]:
    """What has been found so far, study by study."""
    return [_result(study, transfer.limit, outcomes) for study in transfer.studies]


def _result(study: Study, limit: int, outcomes: Outcomes) -> Result:
    found = study.optima(outcomes, limit)
    index = study.transferred(found)
    best = {width: study.mean_loss(outcomes, width, optimum.index) for width, optimum in found.items()}
    transfer = {width: None if index is None else study.mean_loss(outcomes, width, index) for width in found}
    costs = {width: study.costs(outcomes, limit, width, optimum.index) for width, optimum in found.items()}
    return Result(study, found, _known(best), _known(transfer), costs, drift(found))


def _known(losses: Mapping[int, float | None]) -> dict[int, float]:
    return {width: loss for width, loss in losses.items() if loss is not None}


@dataclass(frozen=True)
class Converted:
    """Adam's best rate of a width made one of SPlus, held against its best.

    ``published``: what the paper's recipe makes of it. ``loss``: at the nearest rate of the grid to ``lr``; both losses
    are the mean over all seeds, None until they have run.
    """

    objective: str
    width: int
    adam_lr: float
    lr: float
    best_lr: float
    loss: float | None
    best_loss: float | None

    @property
    def published(self) -> float:
        """arXiv 2506.07254v2, section 7."""
        return 2 * self.adam_lr * self.width

    @property
    def cost(self) -> str:
        """What the converted rate loses against the best, in percent."""
        if self.loss is None or self.best_loss is None:
            return "–"
        return f"{100 * (self.loss / self.best_loss - 1):+.1f}%"


def conversions(transfer: Transfer, outcomes: Outcomes) -> list[Converted]:
    """What has been found so far of how :func:`splus.lr_from_adam` does, width by width."""
    found = []
    for pair in transfer.conversions:
        from_adam, own = pair.adam.optima(outcomes, transfer.limit), pair.splus.optima(outcomes, transfer.limit)
        for width, index in pair.indices(outcomes, transfer.limit).items():
            loss = pair.splus.mean_loss(outcomes, width, index)
            best = pair.splus.mean_loss(outcomes, width, own[width].index)
            adam_lr, best_lr = 2 ** from_adam[width].octaves, 2 ** own[width].octaves
            lr = lr_from_adam(adam_lr, width)
            found.append(Converted(pair.splus.objective, width, adam_lr, lr, best_lr, loss, best))
    return found


def write_optima(found: Sequence[Result], path: Path) -> None:
    rows = [
        [
            result.study.objective, result.study.optimizer, width,
            f"{2**best.octaves:.6g}", f"{2**best.low:.6g}", f"{2**best.high:.6g}",
            str(best.bracketed).lower(), _number(result.best.get(width)), _number(result.transfer.get(width)),
        ]
        for result in found
        for width, best in result.optima.items()
    ]  # fmt: skip
    _write(path, OPTIMA, rows)


def write_slopes(found: Sequence[Result], path: Path) -> None:
    rows = [
        [result.study.objective, result.study.optimizer, *(f"{x:.4f}" for x in (slope.value, slope.low, slope.high))]
        for result in found
        if (slope := result.slope)
    ]
    _write(path, SLOPES, rows)


def write_conversions(found: Sequence[Converted], path: Path) -> None:
    rows = [
        [row.objective, row.width, *(f"{x:.6g}" for x in (row.adam_lr, row.lr, row.best_lr)),
         _number(row.loss), _number(row.best_loss)]
        for row in found
    ]  # fmt: skip
    _write(path, CONVERSIONS, rows)


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def terminal_tables(found: Sequence[Result], converted: Sequence[Converted]) -> list[Table]:
    """The best rates and what transfer costs, and what other rates cost; the drifts; Adam's rates converted."""
    by_objective: dict[str, list[Result]] = {}
    for result in found:
        by_objective.setdefault(result.study.objective, []).append(result)
    tables = [make(of) for of in by_objective.values() for make in (_widths_table, _costs_table)]
    conversion = [_conversion_table(converted)] if converted else []
    return [*tables, _drift_table(found), *conversion]


def _widths_table(found: Sequence[Result]) -> Table:
    widths = sorted({width for result in found for width in result.study.widths})
    table = Table(found[0].study.objective, *(f"width {width}" for width in widths), box=box.SIMPLE_HEAD)
    table.caption = (
        "best value, * if not bracketed; loss at the nearest that was run; "
        "+ what the value that is best at the narrowest width loses against it"
    )
    for result in found:
        cells = [_cell(result, width) for width in widths]
        table.add_row(f"{result.study.optimizer}\n{_knob(result)}", *cells)
    return table


def _cell(result: Result, width: int) -> str:
    best = result.optima.get(width)
    if best is None:
        return "–"
    cost = result.cost(width)
    line = f"{2**best.octaves:.3g}{'' if best.bracketed else ' *'}\n{_number(result.best.get(width))[:-2]}"
    if cost is None:
        return line
    return line + (f" {100 * cost:+.1f}%" if math.isfinite(cost) else " diverged")


def _costs_table(found: Sequence[Result]) -> Table:
    """What values an octave or less from the best lose, each over the seeds that ran it and the best one."""
    offsets = range(-PER_OCTAVE, PER_OCTAVE + 1)
    octaves = (f"{offset / PER_OCTAVE:+g}" for offset in offsets)
    name = Column(found[0].study.objective, no_wrap=True)
    table = Table(name, Column("width", no_wrap=True), *octaves, box=box.SIMPLE_HEAD)
    table.caption = "loss at the values of the grid around the best, by octaves, over the loss at the nearest to it"
    for result in found:
        for width, best in result.optima.items():
            cells = []
            for offset in offsets:
                cost = result.costs[width].get(best.index + offset)
                cells.append("–" if cost is None else f"{rate(best.index + offset):.3g} {100 * cost:+.1f}%")
            table.add_row(result.study.optimizer, str(width), *cells)
    return table


def _drift_table(found: Sequence[Result]) -> Table:
    table = Table("drift of the best value", "octaves per doubling of the width", "95% interval", box=box.SIMPLE_HEAD)
    for result in found:
        if result.slope:
            slope = result.slope
            table.add_row(
                f"{result.study.objective}, {result.study.optimizer}",
                f"{slope.value:+.2f}",
                f"{slope.low:+.2f} to {slope.high:+.2f}",
            )
    return table


def _conversion_table(converted: Sequence[Converted]) -> Table:
    columns = ("", "width", "Adam's best", "lr_from_adam", "SPlus's best", "loss over the best", "the paper's recipe")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in converted:
        rates = (f"{rate:.3g}" for rate in (row.adam_lr, row.lr, row.best_lr))
        table.add_row(row.objective, str(row.width), *rates, row.cost, f"{row.published:.3g}")
    return table


def _knob(result: Result) -> str:
    return result.study.knob.removeprefix("+").removeprefix("optimizer.")
