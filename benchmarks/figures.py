"""The figures of the comparison: as PNG on white, and as SVG whose colours follow the page (light or dark)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import bracket
from benchmarks.comparison import REFERENCE, Comparison, Condition
from benchmarks.methods import Row
from benchmarks.steps_to_adam import Curve, crossing
from benchmarks.sweep import Outcomes
from benchmarks.table import Entry

INK, GRID = "#303030", "#dcdcdc"
COLORS = {"adam": "#c4511c", "adam_ema": "#d99a1f", "splus": "#1f62c4", "splus_live": "#7a9fd6"}
# Of all others, in turn: Paul Tol's "muted" scheme (personal.sron.nl/~pault), readable without seeing all colours.
OTHERS = ("#117733", "#aa4499", "#44aa99", "#999933", "#882255", "#88ccee", "#332288", "#ddcc77", "#cc6677")
VARIABLES = {  # in an SVG each colour becomes a variable of the page's style sheet
    INK: "currentColor", GRID: "var(--line)",
    COLORS["adam"]: "var(--adam)", COLORS["adam_ema"]: "var(--adam-ema)",
    COLORS["splus"]: "var(--splus)", COLORS["splus_live"]: "var(--splus-live)",
}  # fmt: skip
DASHES = {"adam": "-", "adam_ema": "--", "splus": "-", "splus_live": ":"}
STYLE: dict[Any, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID, "axes.grid": True, "axes.grid.which": "major",
    "axes.spines.top": False, "axes.spines.right": False, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "font.size": 10, "axes.titlesize": 11, "legend.frameon": False, "legend.fontsize": 9,
    "axes.titlelocation": "left", "axes.titlepad": 10, "axes.axisbelow": True, "lines.linewidth": 1.6,
    "svg.fonttype": "none", "svg.hashsalt": "comparison",
}  # fmt: skip


def colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each row, by its name."""
    others = [name for name in dict.fromkeys(names) if name not in COLORS]
    return COLORS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}


def dashes(row: Row) -> str:
    return DASHES.get(row.name, "--" if row.name.endswith("_ema") else "-")


def draw(comparison: Comparison, condition: Condition, rows: Sequence[Entry], outcomes: Outcomes) -> dict[str, Figure]:
    """Loss against steps, against seconds and against the learning rate, under one condition."""
    swept = {row: study.swept(row, outcomes) for study, row in comparison.rows(condition)}
    with matplotlib.rc_context(STYLE):
        return {
            "steps": loss_curves(rows, clock=False),
            "seconds": loss_curves(rows, clock=True),
            "learning_rate": learning_rates(swept),
        }


def loss_curves(rows: Sequence[Entry], clock: bool) -> Figure:
    """Validation loss of each row at its best learning rate: the mean over seeds and their range.

    The dotted line is Adam's final loss; where SPlus reaches it is marked.
    """
    figure, axes = panel(f"Loss against {'seconds' if clock else 'steps'}")
    axes.set_xlabel("training time, s" if clock else "step")
    axes.set_ylabel("validation loss")
    color = colors([entry.row.name for entry in rows])
    means = {}
    for entry in rows:
        known = [curve for curve in entry.curves if curve is not None]
        mean = mean_curve(known)
        if mean is None:
            continue
        name = entry.row.name
        means[name] = mean
        x = mean.seconds if clock else mean.steps
        axes.plot(x, mean.losses, dashes(entry.row), color=color[name], label=entry.row.label, zorder=3)
        losses = list(zip(*(curve.losses for curve in known)))
        axes.fill_between(x, [min(v) for v in losses], [max(v) for v in losses], color=color[name], alpha=0.2, lw=0)
    if REFERENCE in means:
        target = means[REFERENCE].losses[-1]
        axes.axhline(target, color=color[REFERENCE], ls=":", lw=1)
        if "splus" in means and (point := crossing(means["splus"], target)):
            axes.plot(point.seconds if clock else point.step, target, "o", color=color["splus"], ms=6, zorder=4)
    if means:
        _leave_out_the_start(axes, list(means.values()))
        axes.legend(loc="best", ncols=1 + len(means) // 8)
    return figure


def mean_curve(curves: Sequence[Curve]) -> Curve | None:
    """The mean over seeds; None without curves."""
    if not curves:
        return None
    seconds = tuple(fmean(values) for values in zip(*(curve.seconds for curve in curves)))
    losses = tuple(fmean(values) for values in zip(*(curve.losses for curve in curves)))
    return Curve(curves[0].steps, seconds, losses)


def _leave_out_the_start(axes: Axes, curves: Sequence[Curve]) -> None:
    """Ends the loss axis where the best curve is after an eighth of the run: what comes before is a steep fall."""
    lows = [loss for curve in curves for loss in curve.losses if math.isfinite(loss)]
    early = [loss for curve in curves for step, loss in zip(curve.steps, curve.losses) if step >= curve.steps[-1] / 8]
    finals = [curve.losses[-1] for curve in curves]
    top = max(max(finals), sorted(early)[int(0.95 * (len(early) - 1))])
    bottom = min(lows)
    margin = 0.05 * (top - bottom) or 1e-3
    axes.set_ylim(bottom - margin, top + margin)


def learning_rates(swept: Mapping[Row, Mapping[int, float | None]]) -> Figure:
    """Final loss of seed 0 at every learning rate tried; crosses at the top are runs that diverged."""
    figure, axes = panel("Loss against learning rate")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final validation loss, seed 0")
    axes.set_xscale("log")
    finite = [loss for losses in swept.values() for loss in losses.values() if loss is not None and math.isfinite(loss)]
    if not finite:
        return figure
    best = min(finite)
    top = min(max(finite), best + 3 * (sorted(finite)[len(finite) // 2] - best) + 1e-3)
    top += 0.06 * (top - best)
    color_of = colors([row.name for row in swept])
    for row, losses in swept.items():
        tried = {index: loss for index, loss in losses.items() if loss is not None}
        inside = [(bracket.rate(i), loss) for i, loss in tried.items() if loss <= top]
        above = [(bracket.rate(i), loss) for i, loss in tried.items() if loss > top]
        color = color_of[row.name]
        axes.plot(*zip(*inside), f"{dashes(row)}o", color=color, ms=4, label=row.label) if inside else None
        for lr, loss in above:  # beyond the axis: a triangle; diverged: a cross, once for the run
            if math.isfinite(loss) or not row.name.endswith(("_ema", "_live")):
                axes.plot(lr, top, "^" if math.isfinite(loss) else "x", color=color, ms=7, mew=1.8, clip_on=False)
        index = bracket.best(tried)
        if index is not None:
            axes.plot(bracket.rate(index), tried[index], "o", color=color, ms=10, mfc="none", mew=1.4)
    axes.set_ylim(best - 0.06 * (top - best), top)
    axes.legend(loc="best", ncols=1 + len(swept) // 8)
    return figure


def panel(heading: str) -> tuple[Figure, Axes]:
    """An empty figure of one place, with its heading."""
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(heading)
    return figure, axes


def save_png(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=160, facecolor="white")


def inline_svg(figure: Figure, name: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """The figure as an <svg> element for a page: transparent, as wide as its place.

    Args:
        variables: of the page's style sheet, by the colours they replace.
    """
    text = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{name}">',
        svg,
        count=1,
    )
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)  # ids are unique in the page, not just in the figure
    for color, variable in variables.items():
        svg = svg.replace(color, variable)
    return svg
