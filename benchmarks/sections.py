"""What the report shows of one condition: who won, the table, the figures and what they are drawn from."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from benchmarks import bracket, interactive
from benchmarks.cells import Cell, Outcome, compose_config
from benchmarks.comparison import REFERENCE, Comparison, Condition
from benchmarks.estimates import Estimate, paired_difference
from benchmarks.figures import Look, Span, Swept, draw, draw_ratios, inline_svg, not_reached, save_png
from benchmarks.methods import Row, method_name
from benchmarks.progress import summary
from benchmarks.summary import OURS, verdict
from benchmarks.sweep import Outcomes
from benchmarks.table import HEADINGS, Entry, brackets, condition_title, estimate_text, reproduce, state_text, texts

LOG_LINES = 20  # of the end of a crashed run's error


def section(
    comparison: Comparison,
    condition: Condition,
    rows: Sequence[Entry],
    outcomes: Outcomes,
    look: Mapping[str, Look],
    name: str,
    figures: Path,
) -> dict[str, Any]:
    """What the template needs.

    Args:
        rows: of the condition.
        name: no other section of the page has it.
        figures: the folder in which the figures are left as PNG too.
    """
    swept = {row: study.swept(row, outcomes) for study, row in comparison.rows(condition)}
    adam = next((entry for entry in rows if entry.row.name == REFERENCE), None)
    title = condition_title(condition)
    says = described(title, rows, swept)
    figures.mkdir(parents=True, exist_ok=True)

    def shown(kind: str, figure: Figure) -> Markup:
        save_png(figure, figures / f"{name}-{kind}.png")
        figure.set_layout_engine("none")  # as it is laid out by now
        return Markup(inline_svg(figure, f"{name}-{kind}", says=says[kind]))

    return {
        "name": name,
        "title": title,
        "winners": winners(rows),
        "verdict": verdict(rows),
        "ratios": shown("ratios", draw_ratios(rows, look)),
        "headings": (*HEADINGS, "state, MB"),
        "rows": [(entry.row.name == OURS, [*texts(entry), state_text(entry, adam)]) for entry in rows],
        "figures": [shown(kind, figure) for kind, figure in draw(rows, swept, look).items()],
        "items": interactive.items(rows, swept, look),
        "legend": [(entry.row.name, entry.row.label, look[entry.row.name].variable) for entry in rows],
        "curves": curve_table(rows),
        "rates": rate_table(swept),
        "samples": samples(rows),
    }


def winners(rows: Sequence[Entry]) -> list[dict[str, str]]:
    """Of each of three measures the best row, and how sure its lead over the next optimizer is."""
    measures: dict[str, tuple[Callable[[Entry], Estimate], int]] = {
        "Fewest steps to Adam's loss": (lambda entry: entry.steps, 2),
        "Least time to Adam's loss": (lambda entry: entry.time, 2),
        "Lowest final loss": (lambda entry: entry.loss, 3),
    }
    return [won(name, rows, value, digits) for name, (value, digits) in measures.items()]


def won(name: str, rows: Sequence[Entry], value: Callable[[Entry], Estimate], digits: int) -> dict[str, str]:
    ranked = sorted((entry for entry in rows if value(entry).complete), key=lambda entry: value(entry).mean)
    if not ranked:
        return {
            "measure": name,
            "label": "nobody",
            "number": "",
            "interval": "",
            "next": "no row has a result with every seed",
        }
    best = ranked[0]
    number, interval = estimate_text(value(best), "", digits)
    others = [entry for entry in ranked if method_name(entry.row.name) != method_name(best.row.name)]
    after = "no other optimizer has a result"
    if others:
        second, lead = others[0], paired_difference(value(best).values, value(others[0]).values)
        after = f"next: {second.row.label}, {value(second).mean:.{digits}f}"
        if lead is None:
            after += " (one seed: no telling how sure)"
        else:
            sure = "a clear lead" if lead.significant else "not a significant lead"
            after += f"; {sure}: {lead.mean:+.{digits}f}, 95% {lead.low:+.{digits}f} to {lead.high:+.{digits}f}"
    return {"measure": name, "label": best.row.label, "number": number, "interval": interval, "next": after}


def described(title: str, rows: Sequence[Entry], swept: Mapping[Row, Swept]) -> dict[str, str]:
    """What each figure says, in words."""
    ratios = [f"{entry.row.label} {_ratio(entry.steps)}, {_ratio(entry.time)}" for entry in rows]
    finals = [f"{entry.row.label} {entry.loss.mean:.3f}" for entry in rows if entry.loss.complete]
    best = {row.label: bracket.best(losses) for row, losses in swept.items()}
    rates = [f"{label} {bracket.rate(index):.3g}" for label, index in best.items() if index is not None]
    ends = f"; the means end at: {', '.join(finals) or 'no finite loss'}"
    return {
        "ratios": f"{title}: steps and time to Adam's final loss, over Adam's: {'; '.join(ratios)}",
        "steps": f"{title}: validation loss against steps{ends}",
        "seconds": f"{title}: validation loss against training seconds{ends}",
        "learning_rate": f"{title}: final loss against the learning rate; the best: {', '.join(rates) or 'none'}",
    }


def _ratio(value: Estimate) -> str:
    number, interval = estimate_text(value, "")
    return number + brackets(interval) if value.complete else not_reached(value)


def curve_table(rows: Sequence[Entry]) -> dict[str, Any]:
    """The mean loss of every row at every evaluation; rows that are evaluated at other steps leave gaps."""
    spans = {entry.row.label: span for entry in rows if (span := Span.of(entry.curves))}
    losses = {label: dict(zip(span.mean.steps, span.mean.losses)) for label, span in spans.items()}
    steps = sorted({step for of_row in losses.values() for step in of_row})
    return {
        "headings": ("step", *losses),
        "rows": [(str(step), [_loss(of_row.get(step)) for of_row in losses.values()]) for step in steps],
    }


def rate_table(swept: Mapping[Row, Swept]) -> dict[str, Any]:
    """The final loss of seed 0 at every learning rate."""
    indices = sorted({index for losses in swept.values() for index in losses})
    return {
        "headings": ("learning rate", *(row.label for row in swept)),
        "rows": [
            (
                f"{bracket.rate(index):.4g}",
                [("crashed" if index in of and of[index] is None else _loss(of.get(index))) for of in swept.values()],
            )
            for index in indices
        ],
    }


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if math.isfinite(value) else "diverged"


def samples(rows: Sequence[Entry]) -> list[dict[str, str]]:
    """Images sampled after the best runs of Adam and SPlus (seed 0), where the runs have left some."""
    found = []
    for entry in rows:
        if entry.row.name in (REFERENCE, OURS) and entry.outcomes:
            path = entry.outcomes[0].directory / "samples.png"
            if path.exists():
                data = base64.b64encode(path.read_bytes()).decode()
                found.append({"label": entry.row.label, "source": f"data:image/png;base64,{data}"})
    return found


def studies(outcomes: Outcomes) -> list[dict[str, Any]]:
    """By study, the whole configuration of one run and what became of all."""
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(outcomes, key=lambda cell: cell.name):
        groups.setdefault(cell.group, []).append(cell)
    return [
        {
            "name": group,
            "first": cells[0].name,
            "configuration": OmegaConf.to_yaml(compose_config(cells[0].overrides)),
            "runs": [run(cell, outcomes[cell]) for cell in cells],
        }
        for group, cells in groups.items()
    ]


def run(cell: Cell, outcome: Outcome) -> dict[str, str]:
    """Of one run: how it ended, the command that repeats it, and its evaluations or the end of its error."""
    crashed = outcome.status == "crashed"
    return {
        "name": cell.name,
        "status": outcome.status,
        "summary": summary(outcome),
        "command": reproduce(cell),
        "log": "\n".join(outcome.error.strip().splitlines()[-LOG_LINES:]) if crashed else evaluations(outcome),
    }


def evaluations(outcome: Outcome) -> str:
    """Step, seconds and the loss of each set of weights, an evaluation a line."""
    curves = outcome.curves
    if not curves:
        return ""
    lines = [("step", "seconds", *curves)]
    first = next(iter(curves.values()))
    losses = [dict(zip(curve.steps, curve.losses)) for curve in curves.values()]
    for step, seconds in zip(first.steps, first.seconds):
        lines.append((str(step), f"{seconds:.1f}", *(_loss(of.get(step)) for of in losses)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths)) for line in lines)
