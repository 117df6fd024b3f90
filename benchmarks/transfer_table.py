"""What a sweep over widths found: its numbers, on the terminal and as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich import box
from rich.table import Table

from benchmarks.optima import Optimum, Slope, drift
from benchmarks.sweep import Outcomes
from benchmarks.transfer import Study, Transfer

OPTIMA = (
    *("objective", "optimizer", "width", "best_lr", "best_lr_low", "best_lr_high"),
    *("bracketed", "best_loss", "transfer_loss"),
)
SLOPES = ("objective", "optimizer", "slope", "slope_low", "slope_high")


@dataclass(frozen=True)
class Result:
    """One study: by width the optimum, and the mean loss at the rate that is best at the narrowest (if it has run)."""

    study: Study
    optima: dict[int, Optimum]
    transfer: dict[int, float]
    slope: Slope | None

    def cost(self, width: int) -> float | None:
        """What the transferred rate loses against the width's own best, as a fraction of its loss."""
        loss = self.transfer.get(width)
        return None if loss is None else loss / self.optima[width].loss - 1


def results(transfer: Transfer, outcomes: Outcomes) -> list[Result]:
    """What has been found so far, study by study."""
    return [_result(study, transfer.limit, outcomes) for study in transfer.studies]


def _result(study: Study, limit: int, outcomes: Outcomes) -> Result:
    found = study.optima(outcomes, limit)
    index = study.transferred(found)
    losses: dict[int, float] = {}
    for width in found:
        if index is None:
            break
        cells = [study.cell(width, index, seed) for seed in range(study.seeds)]
        if all(cell in outcomes for cell in cells):
            values = [study.loss(outcomes, width, seed, index) for seed in range(study.seeds)]
            losses[width] = fmean(math.nan if value is None else value for value in values)
    return Result(study, found, losses, drift(found))


def write_optima(found: Sequence[Result], path: Path) -> None:
    rows = [
        [
            result.study.objective, result.study.optimizer, width,
            f"{2**best.octaves:.6g}", f"{2**best.low:.6g}", f"{2**best.high:.6g}",
            str(best.bracketed).lower(), f"{best.loss:.6f}", _number(result.transfer.get(width)),
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


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def terminal_tables(found: Sequence[Result]) -> list[Table]:
    """By objective, the best rate at every width and what transfer costs there; and the drifts."""
    return [_widths_table(found), _drift_table(found)]


def _widths_table(found: Sequence[Result]) -> Table:
    widths = sorted({width for result in found for width in result.study.widths})
    table = Table("", *(f"width {width}" for width in widths), box=box.SIMPLE_HEAD)
    table.caption = (
        "best value, * if not bracketed; mean loss there; "
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
    line = f"{2**best.octaves:.3g}{'' if best.bracketed else ' *'}\n{best.loss:.4f}"
    if cost is None:
        return line
    return line + (f" +{100 * cost:.1f}%" if math.isfinite(cost) else " diverged")


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


def _knob(result: Result) -> str:
    return result.study.knob.removeprefix("+").removeprefix("optimizer.")
