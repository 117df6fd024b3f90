"""The report of a sweep over widths: one self-contained HTML file, and its figures as PNG."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.figures import GRID, INK, MARKERS, STYLE, inline_svg, panel, save_png
from benchmarks.report import facts, template
from benchmarks.sweep import Outcomes
from benchmarks.table import title
from benchmarks.transfer import Transfer
from benchmarks.transfer_table import Converted, Result

FLAGGED = 0.1  # octaves per doubling that we hold SPlus to over widths 32 to 512
# Of an optimizer's name in the figure of all optima; the page's style sheet has one for each.
COLORS = {"splus": "#1f62c4", "adam": "#c4511c", "muon": "#3d8b57"}
OTHER = "#84619f"
VARIABLES = {
    INK: "currentColor", GRID: "var(--line)", OTHER: "var(--other)",
    COLORS["splus"]: "var(--splus)", COLORS["adam"]: "var(--adam)", COLORS["muon"]: "var(--muon)",
}  # fmt: skip


def write_report(
    transfer: Transfer,
    found: Sequence[Result],
    converted: Sequence[Converted],
    outcomes: Outcomes,
    output: Path,
    workers: int,
    settings: str,
) -> Path:
    """Writes ``output``/report.html and ``output``/figures/*.png; returns the path of the report."""
    widths = sorted({width for result in found for width in result.study.widths})
    objectives = list(dict.fromkeys(result.study.objective for result in found))
    page = template("transfer.html").render(
        widths=widths,
        knobs=any(result.study.knob != "optimizer.lr" for result in found),
        sections=[_section(objective, found, transfer, outcomes, widths, output) for objective in objectives],
        converted=[_converted(row) for row in converted],
        flagged=FLAGGED,
        facts=facts(outcomes, workers),
        command=shlex.join(["python", "-m", "benchmarks.lr_transfer", *sys.argv[1:]]),
        settings=settings,
    )
    path = output / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _section(
    objective: str,
    found: Sequence[Result],
    transfer: Transfer,
    outcomes: Outcomes,
    widths: Sequence[int],
    output: Path,
) -> dict[str, Any]:
    own = [result for result in found if result.study.objective == objective]
    (output / "figures").mkdir(parents=True, exist_ok=True)
    svgs = []
    for name, figure in draw(own, transfer.limit, outcomes).items():
        save_png(figure, output / "figures" / f"{objective}-{name}.png")
        svgs.append(Markup(inline_svg(figure, f"{objective}-{name}", VARIABLES)))
    return {"title": title(objective), "rows": [_row(result, widths) for result in own], "figures": svgs}


def _row(result: Result, widths: Sequence[int]) -> dict[str, Any]:
    slope = result.slope
    drifts = "–" if slope is None else f"{slope.value:+.2f}" + (" !" if abs(slope.value) > FLAGGED else "")
    return {
        "name": result.study.optimizer,
        "knob": result.study.knob.removeprefix("+").removeprefix("optimizer."),
        "cells": [_texts(result, width) for width in widths],
        "drift": drifts,
        "interval": "" if slope is None else f"{slope.low:+.2f} to {slope.high:+.2f}",
    }


def _converted(row: Converted) -> tuple[str, ...]:
    rates = (f"{rate:.3g}" for rate in (row.adam_lr, row.lr, row.best_lr))
    return title(row.objective), str(row.width), *rates, row.cost, f"{row.published:.3g}"


def _texts(result: Result, width: int) -> tuple[str, Sequence[str]]:
    best = result.optima.get(width)
    if best is None:
        return "–", ()
    loss, cost = f"loss {result.best.get(width, math.nan):.4f}", result.cost(width)
    if cost is not None:
        loss += f", {100 * cost:+.1f}%" if math.isfinite(cost) else ", diverged"
    return f"{2**best.octaves:.3g}{'' if best.bracketed else ' *'}", (f"{2**best.low:.3g}–{2**best.high:.3g}", loss)


def draw(found: Sequence[Result], limit: int, outcomes: Outcomes) -> dict[str, Figure]:
    """Of one objective: loss against the swept value at every width, by optimizer; and the best values of all."""
    with matplotlib.rc_context(STYLE):
        figures = {result.study.optimizer: sensitivity(result, limit, outcomes) for result in found}
        return figures | {"optima": best_values(found)}


def sensitivity(result: Result, limit: int, outcomes: Outcomes) -> Figure:
    """Loss over that of each width's best, mean over the seeds that tried a value; the minimum of each width marked."""
    figure, axes = panel(f"{result.study.optimizer}: loss above the width's best")
    axes.set_xlabel(result.study.knob.removeprefix("+").removeprefix("optimizer."))
    axes.set_ylabel("loss over the best, %")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    shades = colormaps["viridis"]
    for rank, width in enumerate(result.optima):
        color = shades(0.9 * rank / max(1, len(result.study.widths) - 1))
        best = result.optima[width]
        losses = _losses(result, width, limit, outcomes)
        least = min(losses.values(), default=math.nan)
        points = {i: 100 * (loss / least - 1) for i, loss in losses.items() if math.isfinite(loss)}
        axes.plot([2 ** (i / 2) for i in points], list(points.values()), "o-", ms=3, color=color, label=f"{width}")
        axes.plot(2**best.octaves, 0, "o", ms=9, mfc="none", color=color, clip_on=False, zorder=4)
        for index in losses.keys() - points.keys():
            axes.plot(2 ** (index / 2), 8, "x", color=color, clip_on=False)
    if result.optima:
        axes.axvline(2 ** next(iter(result.optima.values())).octaves, color=INK, ls=":", lw=1)
        axes.legend(title="width")
    axes.set_ylim(-0.3, 8)
    return figure


def _losses(result: Result, width: int, limit: int, outcomes: Outcomes) -> Mapping[int, float]:
    """By index, the mean loss over the seeds that tried it; infinite if one diverged."""
    by_index: dict[int, list[float]] = {}
    for (at, seed), (tried, _) in result.study.indices(outcomes, limit).items():
        for index in tried if at == width else ():
            loss = result.study.loss(outcomes, width, seed, index)
            if loss is not None:
                by_index.setdefault(index, []).append(loss)
    # Seeds differ by more than neighbouring values: only those that all seeds tried can be joined by a line.
    most = max(map(len, by_index.values()), default=0)
    return {index: fmean(losses) for index, losses in sorted(by_index.items()) if len(losses) == most}


def best_values(found: Sequence[Result]) -> Figure:
    """The best value over that of the narrowest width, in octaves, against width; bars span the seeds."""
    figure, axes = panel("Best value against width")
    figure.set_size_inches(4.4, 3.2 + 0.12 * len(found))  # for the legend below
    axes.set_xlabel("width")
    axes.set_ylabel("octaves above the narrowest width's best")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for number, result in enumerate(found):
        if not result.optima:
            continue
        name = result.study.optimizer
        first = next(iter(result.optima.values())).octaves
        y = [best.octaves - first for best in result.optima.values()]
        bars = [
            [best.octaves - best.low for best in result.optima.values()],
            [best.high - best.octaves for best in result.optima.values()],
        ]
        color, dash = COLORS.get(name, OTHER), "-" if name in COLORS else "--"
        marker = MARKERS[number % len(MARKERS)]
        axes.errorbar(list(result.optima), y, bars, color=color, ls=dash, marker=marker, ms=4, capsize=3, label=name)
        for width, best, value in zip(result.optima, result.optima.values(), y):
            if not best.bracketed:
                axes.annotate("not bracketed", (width, value), fontsize=7, xytext=(4, 4), textcoords="offset points")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower left", ncols=2, fontsize=7)
    return figure
