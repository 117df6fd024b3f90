"""What a sweep over widths found: its numbers, on the terminal and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.optima import Optimum, Slope, drift
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
    best at the narrowest width, both the mean over all seeds, once they have run.
    """

    study: Study
    optima: dict[int, Optimum]
    best: dict[int, float]
    transfer: dict[int, float]
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
    return Result(study, found, _known(best), _known(transfer), drift(found))


def _known(losses: Mapping[int, float | None]) -> dict[int, float]:
    return {width: loss for width, loss in losses.items() if loss is not None}


@dataclass(frozen=True)
class Converted:
    """Adam's best rate of a width made one of SPlus, held against its best. ``loss``: at the nearest rate run."""

    objective: str
    width: int
    adam_lr: float
    lr: float
    best_lr: float
    loss: float
    best_loss: float


def conversions(transfer: Transfer, outcomes: Outcomes) -> list[Converted]:
    """What has been found so far of how :func:`splus.lr_from_adam` does, width by width."""
    found = []
    for pair in transfer.conversions:
        from_adam, own = pair.adam.optima(outcomes, transfer.limit), pair.splus.optima(outcomes, transfer.limit)
        for width, index in pair.indices(outcomes, transfer.limit).items():
            loss = pair.splus.mean_loss(outcomes, width, index)
            best = pair.splus.mean_loss(outcomes, width, own[width].index)
            if loss is not None and best is not None:
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
         f"{row.loss:.6f}", f"{row.best_loss:.6f}"]
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
    """By objective, the best rate at every width and what transfer costs there; the drifts; Adam's rates converted."""
    return [_widths_table(found), _drift_table(found), *([_conversion_table(converted)] if converted else [])]


def _widths_table(found: Sequence[Result]) -> Table:
    widths = sorted({width for result in found for width in result.study.widths})
    table = Table("", *(f"width {width}" for width in widths), box=box.SIMPLE_HEAD)
    table.caption = (
        "best value, * if not bracketed; loss at the nearest that was run; "
        "+ what the value that is best at the narrowest width loses against it"
    )
    for result in found:
        cells = [_cell(result, width) for width in widths]
        table.add_row(f"{result.study.objective}\n{result.study.optimizer} ({_knob(result)})", *cells)
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
    columns = ("", "width", "Adam's best", "converted", "SPlus's best", "loss, converted", "best")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in converted:
        rates = (f"{rate:.3g}" for rate in (row.adam_lr, row.lr, row.best_lr))
        cost = f"{row.loss:.4f} {100 * (row.loss / row.best_loss - 1):+.1f}%"
        table.add_row(row.objective, str(row.width), *rates, cost, f"{row.best_loss:.4f}")
    return table


def _knob(result: Result) -> str:
    return result.study.knob.removeprefix("+").removeprefix("optimizer.")
