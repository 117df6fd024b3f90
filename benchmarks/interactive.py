"""The interactive figures of the report: Bokeh's, whose library stands in the page. The page's script, explore.js, lets
the reader choose rows, axis and scale, and paints them in the colours of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.embed import json_item
from bokeh.models.axes import LogAxis
from bokeh.models.ranges import Range1d
from bokeh.models.renderers import DataRenderer, GlyphRenderer
from bokeh.models.sources import ColumnDataSource
from bokeh.models.tools import HoverTool
from bokeh.plotting import figure
from bokeh.resources import Resources

from benchmarks import bracket
from benchmarks.figures import Look, Span, Swept, loss_limits, rate_limits
from benchmarks.methods import Row, method_name
from benchmarks.table import Entry

# matplotlib's names of dashes and markers, and Bokeh's
DASHES = {"-": "solid", "--": "dashed", ":": "dotted"}
MARKERS = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle", "v": "inverted_triangle", "P": "plus", "X": "x",
    "<": "star", ">": "asterisk", "p": "hex", "h": "circle_cross", "d": "square_x",
}  # fmt: skip


def library() -> str:
    """The text of the library, to stand in a script of the page."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def items(rows: Sequence[Entry], swept: Mapping[Row, Swept], look: Mapping[str, Look]) -> list[Any]:
    """The figures of one condition, each as what ``Bokeh.embed.embed_item`` takes."""
    return [json_item(plot) for plot in (curves(rows, look), rates(swept, look))]


def curves(rows: Sequence[Entry], look: Mapping[str, Look]) -> figure:
    """Validation loss of each row over the run, the mean over seeds and their range.

    The columns "steps" and "seconds" of every source are for the horizontal axis.
    """
    spans = {entry.row: span for entry in rows if (span := Span.of(entry.curves))}
    plot = _panel("step", "validation loss", loss_limits([span.mean for span in spans.values()]))
    drawn: list[DataRenderer] = []
    for row, span in spans.items():
        source = ColumnDataSource({
            "steps": span.mean.steps, "seconds": span.mean.seconds, "loss": span.mean.losses,
            "low": span.low, "high": span.high, "label": [row.label] * len(span.mean.steps),
        })  # fmt: skip
        of = look[row.name]
        band = plot.varea("steps", "low", "high", source=source, fill_alpha=0.2)
        line = plot.line("steps", "loss", source=source, line_width=2, line_dash=DASHES[of.dash])
        signs = plot.scatter("steps", "loss", source=source, size=6, marker=MARKERS[of.marker])
        for part in (band, line, signs):
            _name(part, row, of)
        drawn.append(signs)
    tips = [("", "@label"), ("loss", "@loss{0.0000} (@low{0.0000} to @high{0.0000})"), ("step", "@steps"),
            ("time", "@seconds{0.0} s")]  # fmt: skip
    plot.add_tools(HoverTool(renderers=drawn, tooltips=tips))
    return plot


def rates(swept: Mapping[Row, Swept], look: Mapping[str, Look]) -> figure:
    """Final loss of seed 0 at every learning rate; runs that diverged are at the upper end."""
    limits = rate_limits(list(swept.values())) or (0.0, 1.0)
    plot = _panel("learning rate", "final validation loss, seed 0", limits, x_axis_type="log")
    drawn: list[DataRenderer] = []
    for row, losses in swept.items():
        of = look[row.name]
        tried = {bracket.rate(index): loss for index, loss in losses.items() if loss is not None}
        ended = {rate: loss for rate, loss in tried.items() if math.isfinite(loss)}
        diverged = [rate for rate in tried if rate not in ended] if row.name == method_name(row.name) else []
        for points, marker, text in (
            (ended, MARKERS[of.marker], [f"{loss:.4f}" for loss in ended.values()]),
            (dict.fromkeys(diverged, limits[1]), "x", ["diverged"] * len(diverged)),
        ):
            source = ColumnDataSource({
                "rate": list(points), "loss": list(points.values()), "text": text, "label": [row.label] * len(points)
            })  # fmt: skip
            signs = plot.scatter("rate", "loss", source=source, size=8, marker=marker)
            parts: list[GlyphRenderer[Any]] = [signs]
            drawn.append(signs)
            if points is ended:
                parts.append(plot.line("rate", "loss", source=source, line_width=2, line_dash=DASHES[of.dash]))
            for part in parts:
                _name(part, row, of)
    plot.add_tools(HoverTool(renderers=drawn, tooltips=[("", "@label"), ("loss", "@text"), ("rate", "@rate{0.0000}")]))
    return plot


def _panel(x: str, y: str, limits: tuple[float, float], **options: Any) -> figure:
    bottom, top = limits
    plot = figure(
        y_range=Range1d(start=max(bottom, 1e-3 * top), end=top),  # above 0, for its logarithm
        height=380, sizing_mode="stretch_width", tools="pan,box_zoom,wheel_zoom,reset,save", x_axis_label=x,
        y_axis_label=y, background_fill_color=None, border_fill_color=None, outline_line_color=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.active_drag = None  # else a finger on a figure does not scroll the page
    plot.add_layout(LogAxis(axis_label=y, visible=False), "left")  # instead of the first when the scale is logarithmic
    return plot


def _name(part: GlyphRenderer[Any], row: Row, look: Look) -> None:
    """By what the script of the page finds the row and its colour."""
    part.name, part.tags = row.name, [f"--{look.variable}"]
    part.nonselection_glyph = part.muted_glyph = None
