"""The figures of the comparison: as PNG on white, and as SVG whose colours follow the page (light or dark)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import bracket
from benchmarks.comparison import REFERENCE
from benchmarks.estimates import Estimate
from benchmarks.methods import Row, method_name
from benchmarks.steps_to_adam import Curve, crossing
from benchmarks.summary import OURS
from benchmarks.table import Entry

Swept = Mapping[int, "float | None"]  # final losses by the index of the learning rate
INK, GRID = "#303030", "#dcdcdc"
# By the name of a variable of the page's style sheet, a colour for light and one for dark pages. The numbered ones are
# Paul Tol's "muted" scheme (personal.sron.nl/~pault), told apart without seeing all colours, darker or lighter where a
# line would not stand out from the page.
PALETTE = {
    "adam": ("#c4511c", "#ff8a54"), "adam-ema": ("#a4700a", "#f2c04c"),
    "splus": ("#1f62c4", "#6aa6ff"), "splus-live": ("#5583c2", "#8fb4e8"),
    "row-1": ("#117733", "#4cc27a"), "row-2": ("#aa4499", "#e08ad0"), "row-3": ("#2a8c82", "#5fd0c3"),
    "row-4": ("#7d7d1f", "#c8c85a"), "row-5": ("#882255", "#e07aa8"), "row-6": ("#3c86b0", "#88ccee"),
    "row-7": ("#332288", "#a79bf0"), "row-8": ("#8f7a0e", "#ddcc77"), "row-9": ("#c25566", "#f09aa6"),
}  # fmt: skip
OTHERS = [name for name in PALETTE if name.startswith("row-")]
VARIABLES = {INK: "currentColor", GRID: "var(--line)"} | {light: f"var(--{v})" for v, (light, _) in PALETTE.items()}
MARKERS = "osD^vPX<>phd"
DASHES = {"": "-", "_ema": "--", "_live": ":"}
STYLE: dict[Any, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": GRID, "axes.grid": True, "axes.grid.which": "major",
    "axes.spines.top": False, "axes.spines.right": False, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "font.size": 10, "axes.titlesize": 11, "legend.frameon": False, "legend.fontsize": 9,
    "axes.titlelocation": "left", "axes.titlepad": 10, "axes.axisbelow": True, "lines.linewidth": 1.6,
    "svg.fonttype": "none", "svg.hashsalt": "comparison",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """How a row is drawn: ``variable`` of PALETTE; rows of one optimizer differ by their dashes."""

    variable: str
    dash: str
    marker: str

    @property
    def color(self) -> str:
        """On white."""
        return PALETTE[self.variable][0]


def looks(rows: Iterable[Row]) -> dict[str, Look]:
    """The look of each row, by its name: the same wherever a report shows it."""
    found: dict[str, Look] = {}
    methods: list[str] = []
    for name in dict.fromkeys(row.name for row in rows):
        method = method_name(name)
        if method not in methods:
            methods.append(method)
        own = name.replace("_", "-")
        others = [of for of in methods if of not in PALETTE]
        variable = own if own in PALETTE else method
        if variable not in PALETTE:
            variable = OTHERS[others.index(method) % len(OTHERS)]
        marker = MARKERS[methods.index(method) % len(MARKERS)]
        found[name] = Look(variable, DASHES[name.removeprefix(method)], marker)
    return found


def draw(rows: Sequence[Entry], swept: Mapping[Row, Swept], look: Mapping[str, Look]) -> dict[str, Figure]:
    """Loss against steps, against seconds and against the learning rate, under one condition."""
    with matplotlib.rc_context(STYLE):
        return {
            "steps": loss_curves(rows, look, clock=False),
            "seconds": loss_curves(rows, look, clock=True),
            "learning_rate": learning_rates(swept, look),
        }


def draw_ratios(rows: Sequence[Entry], look: Mapping[str, Look]) -> Figure:
    """Steps and time to Adam's final loss with their intervals, the soonest on top, those that never do at the end."""
    order = sorted(rows, key=lambda entry: entry.steps.mean if entry.steps.complete else math.inf)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.8, 0.95 + 0.24 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"wspace": 0.08})
        _whiskers(left, "steps", [(entry.row, entry.steps) for entry in order], look)
        _whiskers(right, "time", [(entry.row, entry.time) for entry in order], look)
        figure.supxlabel("until Adam's final loss, over Adam's", x=1, ha="right", fontsize=10)
    return figure


def _whiskers(axes: Axes, heading: str, values: Sequence[tuple[Row, Estimate]], look: Mapping[str, Look]) -> None:
    axes.set_title(heading)
    axes.axvline(1, color=look[REFERENCE].color if REFERENCE in look else INK, ls=":", lw=1)
    for y, (row, value) in enumerate(values):
        of = look[row.name]
        if value.complete:
            bar = [[value.mean - value.low], [value.high - value.mean]]
            axes.errorbar(value.mean, y, xerr=bar, fmt=of.marker, ms=5, color=of.color, capsize=3, zorder=3)
        else:
            place = axes.get_yaxis_transform()
            axes.text(0, y, f" {not_reached(value)}", transform=place, ha="left", va="center", fontsize=7)
    axes.set_xlim(0, max(1.08, axes.get_xlim()[1]))
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.set_yticks(range(len(values)), [row.label for row, _ in values])
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def not_reached(value: Estimate) -> str:
    if not value.total:
        return "no result"
    return "not reached" + (f" in {value.missing} of {value.total}" if value.missing < value.total else "")


def loss_curves(rows: Sequence[Entry], look: Mapping[str, Look], clock: bool) -> Figure:
    """Validation loss of each row at its best learning rate: the mean over seeds and their range.

    The dotted line is Adam's final loss; where SPlus reaches it is marked.
    """
    figure, axes = panel(f"Loss against {'seconds' if clock else 'steps'}")
    axes.set_xlabel("training time, s" if clock else "step")
    axes.set_ylabel("validation loss")
    spans = {entry.row: span for entry in rows if (span := Span.of(entry.curves))}
    means = {row.name: span.mean for row, span in spans.items()}
    for row, span in spans.items():
        of, x = look[row.name], span.mean.seconds if clock else span.mean.steps
        style: dict[str, Any] = {"color": of.color, "ls": of.dash, "marker": of.marker, "ms": 4, "zorder": 3}
        axes.plot(x, span.mean.losses, label=row.label, markevery=0.25, **style)
        axes.fill_between(x, span.low, span.high, color=of.color, alpha=0.2, lw=0)
    if REFERENCE in means:
        target = means[REFERENCE].losses[-1]
        axes.axhline(target, color=look[REFERENCE].color, ls=":", lw=1)
        if OURS in means and (point := crossing(means[OURS], target)):
            axes.plot(
                point.seconds if clock else point.step, target, "o", color=look[OURS].color, ms=9, mfc="none", zorder=4
            )
    if means:
        axes.set_ylim(*loss_limits(list(means.values())))
        _legend(figure, axes)
    return figure


@dataclass(frozen=True)
class Span:
    """The mean of the curves of a row's seeds, and the lowest and highest at each evaluation that all of them have."""

    mean: Curve
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, curves: Sequence[Curve | None]) -> Span | None:
        """None without curves."""
        known = [curve for curve in curves if curve is not None]
        if not known:
            return None
        shared = set.intersection(*(set(curve.steps) for curve in known))
        known = [_at(curve, shared) for curve in known]
        seconds = tuple(fmean(values) for values in zip(*(curve.seconds for curve in known)))
        losses = list(zip(*(curve.losses for curve in known)))
        mean = Curve(known[0].steps, seconds, tuple(map(fmean, losses)))
        return cls(mean, tuple(map(min, losses)), tuple(map(max, losses)))


def _at(curve: Curve, steps: Container[int]) -> Curve:
    """The evaluations of a curve at some of its steps."""
    kept = [point for point in zip(curve.steps, curve.seconds, curve.losses) if point[0] in steps]
    return Curve(*map(tuple, zip(*kept)))


def loss_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Of the loss axis, which ends where the best curves are after an eighth of the run: before it is a steep fall."""
    lows = [loss for curve in curves for loss in curve.losses if math.isfinite(loss)]
    early = [loss for curve in curves for step, loss in zip(curve.steps, curve.losses) if step >= curve.steps[-1] / 8]
    early = sorted(filter(math.isfinite, early))
    finals = [curve.losses[-1] for curve in curves if math.isfinite(curve.losses[-1])]
    if not early or not finals:
        return 0.0, 1.0
    top = max(max(finals), early[int(0.95 * (len(early) - 1))])
    bottom = min(lows)
    margin = 0.05 * (top - bottom) or 1e-3
    return bottom - margin, top + margin


def learning_rates(swept: Mapping[Row, Swept], look: Mapping[str, Look]) -> Figure:
    """Final loss of seed 0 at every learning rate tried; crosses at the top are runs that diverged."""
    figure, axes = panel("Loss against learning rate")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final validation loss, seed 0")
    axes.set_xscale("log")
    limits = rate_limits(list(swept.values()))
    if limits is None:
        return figure
    bottom, top = limits
    for row, losses in swept.items():
        of = look[row.name]
        tried = {index: loss for index, loss in losses.items() if loss is not None}
        inside = [(bracket.rate(i), loss) for i, loss in tried.items() if loss <= top]
        style: dict[str, Any] = {"color": of.color, "ls": of.dash, "marker": of.marker, "ms": 4, "label": row.label}
        axes.plot(*zip(*inside), **style) if inside else None
        for index, loss in tried.items():  # beyond the axis: a triangle; diverged: a cross, once for the run
            beyond = loss > top and (math.isfinite(loss) or row.name == method_name(row.name))
            if beyond:
                sign = "^" if math.isfinite(loss) else "x"
                axes.plot(bracket.rate(index), top, sign, color=of.color, ms=7, mew=1.8, clip_on=False)
        best = bracket.best(tried)
        if best is not None:
            axes.plot(bracket.rate(best), tried[best], "o", color=of.color, ms=10, mfc="none", mew=1.4)
    axes.set_ylim(bottom, top)
    _legend(figure, axes)
    return figure


def rate_limits(swept: Sequence[Swept]) -> tuple[float, float] | None:
    """Of the axis of final losses, which leaves out those far worse than most; None without a finite one."""
    finite = [loss for losses in swept for loss in losses.values() if loss is not None and math.isfinite(loss)]
    if not finite:
        return None
    best = min(finite)
    top = min(max(finite), best + 3 * (sorted(finite)[len(finite) // 2] - best) + 1e-3)
    top += 0.06 * (top - best)
    return best - 0.06 * (top - best), top


def _legend(figure: Figure, axes: Axes) -> None:
    """In the figure; of many rows below it, in two columns."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) <= 6:
        axes.legend(loc="best")
    else:
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(names) / 2))
        figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8)


def panel(heading: str) -> tuple[Figure, Axes]:
    """An empty figure of one place, with its heading."""
    figure = Figure(figsize=(4.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(heading)
    return figure, axes


def save_png(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=200, facecolor="white")


def inline_svg(figure: Figure, name: str, variables: Mapping[str, str] = VARIABLES, says: str = "") -> str:
    """The figure as an <svg> element for a page: transparent, as wide as its place.

    Args:
        name: no other figure of the page has it.
        says: what the figure shows, for those who do not see it; default: its name.
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
        lambda match: f'<svg viewBox="{match[1]}" role="img" aria-label="{escape(says or name)}">',
        svg,
        count=1,
    )
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)  # ids are unique in the page, not just in the figure
    for color, variable in variables.items():
        svg = svg.replace(color, variable)
    return svg
