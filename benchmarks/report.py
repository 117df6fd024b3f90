"""The report of the comparison: one self-contained HTML file."""

from __future__ import annotations

import base64
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from omegaconf import OmegaConf

from benchmarks.cells import code_digest, made_by_other_code
from benchmarks.comparison import ADAM, SPLUS, Comparison
from benchmarks.figures import draw, inline_svg, save_png
from benchmarks.machine import processor, usable_cores
from benchmarks.progress import summary
from benchmarks.sweep import Outcomes
from benchmarks.table import HEADINGS, Entry, headline, notes, reproduce, texts, title

PACKAGES = ("torch", "numpy", "hydra-core", "einops", "matplotlib")


def write_report(
    comparison: Comparison, rows: Sequence[Entry], outcomes: Outcomes, output: Path, settings: dict[str, Any]
) -> Path:
    """Writes `output`/report.html and `output`/figures/*.png; returns the path of the report.

    Args:
        settings: of the comparison, to be shown; `workers` is the number that was used.
    """
    page = template("report.html").render(
        comparison=comparison,
        headline=headline(rows),
        headings=HEADINGS,
        notes=notes(rows),
        sections=[section(comparison, objective, rows, outcomes, output) for objective in comparison.objectives],
        crashed=[cell.name for cell, outcome in outcomes.items() if outcome.status == "crashed"],
        other_code=sum(map(made_by_other_code, outcomes.values())),
        facts=facts(outcomes, settings["workers"]),
        command=shlex.join(["python", "-m", "benchmarks.compare", *sys.argv[1:]]),
        settings=OmegaConf.to_yaml(settings),
        configurations=configurations(rows, outcomes),
        runs=run_lines(outcomes),
    )
    path = output / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def section(
    comparison: Comparison, objective: str, rows: Sequence[Entry], outcomes: Outcomes, output: Path
) -> dict[str, Any]:
    """What the report shows of one objective; its figures are also written as PNG."""
    own = [entry for entry in rows if entry.objective == objective]
    (output / "figures").mkdir(parents=True, exist_ok=True)
    svgs = []
    for kind, figure in draw(comparison, objective, own, outcomes).items():
        save_png(figure, output / "figures" / f"{objective}-{kind}.png")
        svgs.append(Markup(inline_svg(figure, f"{objective}-{kind}")))
    return {"title": title(objective), "rows": own, "texts": texts, "figures": svgs, "samples": samples(own)}


def template(name: str) -> Any:
    folder = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def samples(rows: Sequence[Entry]) -> list[dict[str, str]]:
    """Images sampled after the best runs of Adam and SPlus (seed 0), where the runs have left some."""
    found = []
    for entry in rows:
        if entry.row in (ADAM, SPLUS) and entry.outcomes:
            path = entry.outcomes[0].directory / "samples.png"
            if path.exists():
                data = base64.b64encode(path.read_bytes()).decode()
                found.append({"label": entry.row.label, "source": f"data:image/png;base64,{data}"})
    return found


def run_lines(outcomes: Outcomes) -> list[dict[str, str]]:
    """Every run: name, how it ended, and the command that repeats it."""
    return [
        {"name": cell.name, "status": o.status, "summary": summary(o), "command": reproduce(cell)}
        for cell, o in sorted(outcomes.items(), key=lambda item: item[0].name)
    ]


def configurations(rows: Sequence[Entry], outcomes: Outcomes) -> dict[str, str]:
    """By name, the whole configuration of the best run of each row that has a learning rate of its own."""
    cells = {outcome.directory: cell for cell, outcome in outcomes.items()}
    best = [cells[e.outcomes[0].directory] for e in rows if e.row.weights == e.row.chosen_on and e.outcomes]
    return {cell.name: OmegaConf.to_yaml(cell.config) for cell in best}


def facts(outcomes: Outcomes, workers: int) -> dict[str, str]:
    """Versions, machine and dates."""
    times = [path.stat().st_mtime for o in outcomes.values() for path in o.directory.glob("*.*")]
    when = [time.strftime("%Y-%m-%d %H:%M", time.localtime(t)) for t in (min(times), max(times))] if times else ["–"]
    seconds = sum(float(o.result.get("seconds") or 0) for o in outcomes.values())
    return {
        "Runs": f"{len(outcomes)}, {seconds / 60:.1f} minutes of training in all",
        "Dates": " to ".join(dict.fromkeys(when)),
        "Machine": f"{processor()}, {usable_cores()} usable cores, {platform.system()} {platform.machine()}",
        "Workers": f"{workers} runs at once",
        "Python": platform.python_version(),
        "Packages": ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES),
        "Code": f"splus and train, sha256 {code_digest()}",
    }
