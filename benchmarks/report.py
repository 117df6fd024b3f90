"""The report of one comparison or of several: one self-contained HTML file.

    python -m benchmarks.report DIR [DIR ...] [--output FILE]

Each DIR is one that `python -m benchmarks.compare` has left; of its files comparison.yaml, runs.csv and curves.jsonl
are enough. The figures are left as PNG too, beside FILE, which is report.html in DIR, or here if there are several.
"""

from __future__ import annotations

import argparse
import csv
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from benchmarks import interactive
from benchmarks.cells import Outcome, code_digest, finished_earlier, made_by_other_code
from benchmarks.command import SettingError, run_command
from benchmarks.compare import SETTINGS, comparison_from
from benchmarks.comparison import Comparison
from benchmarks.figures import PALETTE, looks
from benchmarks.ledger import read
from benchmarks.machine import processor, usable_cores
from benchmarks.pace import clocks, on_common_clocks
from benchmarks.sections import section, studies
from benchmarks.summary import means
from benchmarks.sweep import Outcomes
from benchmarks.table import Entry, entries, notes

TEMPLATES = Path(__file__).parent / "templates"
PACKAGES = ("torch", "numpy", "hydra-core", "einops", "matplotlib")


@dataclass(frozen=True)
class Results:
    """A comparison and what has become of it.

    Attributes:
        folder: in which it lies.
        command: that made it.
        facts: what it was run with and on.
    """

    folder: Path
    config: DictConfig
    comparison: Comparison
    outcomes: Outcomes
    rows: Sequence[Entry]
    command: str
    facts: dict[str, str]


def load(folder: Path) -> Results:
    """What ``benchmarks.compare`` has left in a folder, wherever that has been moved since.

    Raises:
        SettingError: it has left nothing there, or is too old.
    """
    path = folder / SETTINGS
    if not path.exists():
        raise SettingError(f"{folder} given, which has no {SETTINGS}; a folder left by benchmarks.compare is required")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)  # what is not there is an error
    try:
        config.output = str(folder)
        comparison = comparison_from(config)
    except AttributeError as error:
        raise SettingError(
            f"{path} is of another version of benchmarks.compare ({str(error).splitlines()[0]}); run that again with "
            f"output={folder} report_only=true"
        ) from None
    known = crashed_earlier(folder / "cells") | read(folder / "runs.csv", curves=True)
    outcomes = on_common_clocks(finished_earlier(comparison.wanted, folder / "cells", known), comparison, config)
    command = path.read_text().partition("\n")[0].removeprefix("# ")
    facts = provenance(folder, outcomes, clocks(comparison, config))
    return Results(folder, config, comparison, outcomes, entries(comparison, outcomes), command, facts)


def crashed_earlier(cells: Path) -> dict[str, Outcome]:
    """The runs that have left an error, by the keys of their configurations, with which the names of folders end."""
    return {
        path.parent.name.rpartition("-")[2]: Outcome(path.parent, "crashed", 0.0, {}, path.read_text())
        for path in cells.glob("*/error.txt")
    }


def provenance(folder: Path, outcomes: Outcomes, clocks: str) -> dict[str, str]:
    """With what and on what the runs of a folder were made, as its list of runs says, and whose clocks they have."""
    about = {"Runs": training_time(outcomes), "Dates": dates(outcomes), "Clocks": clocks}
    path = folder / "runs.csv"
    if path.exists():
        with open(path, newline="") as file:
            lines = list(csv.DictReader(file))
        for title, column in (("Machine", "machine"), ("PyTorch", "torch"), ("Code of splus and train", "code")):
            about[title] = ", ".join(sorted({line[column] for line in lines}))
    return about


def write_report(results: Sequence[Results], path: Path) -> Path:
    """Writes the report to ``path``, and beside it figures/*.png; returns ``path``."""
    look = looks(entry.row for of in results for entry in of.rows)
    folders = []
    for number, of in enumerate(results, 1):
        prefix = f"{number}-" if len(results) > 1 else ""
        folders.append({
            "title": of.config.title,
            "preset": of.config.preset,
            "folder": of.folder.name,
            "means": means(of.rows),
            "seeds": max(study.seeds for study in of.comparison.studies),
            "limit": max(study.limit for study in of.comparison.studies),
            "notes": notes(of.rows),
            "sections": [
                section(
                    of.comparison, condition, [entry for entry in of.rows if entry.condition == condition],
                    of.outcomes, look, prefix + condition.name, path.parent / "figures",
                )
                for condition in of.comparison.conditions
            ],
            "crashed": [cell.name for cell, outcome in of.outcomes.items() if outcome.status == "crashed"],
            "other_code": sum(map(made_by_other_code, of.outcomes.values())),
            "facts": of.facts,
            "command": of.command,
            "settings": OmegaConf.to_yaml(of.config, resolve=True),
            "studies": studies(of.outcomes),
        })  # fmt: skip
    page = template("report.html").render(
        title="; ".join(dict.fromkeys(str(of.config.title) for of in results)),
        folders=folders,
        written_with=packages(),
        library=Markup(interactive.library()),
        script=Markup((TEMPLATES / "explore.js").read_text()),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def template(name: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["palette"] = PALETTE
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # Bokeh's models are defined where first mentioned
    return environment.get_template(name)


def facts(outcomes: Outcomes, workers: int) -> dict[str, str]:
    """Versions, machine and dates of runs that were made here."""
    return {
        "Runs": training_time(outcomes),
        "Dates": dates(outcomes),
        "Machine": f"{processor()}, {usable_cores()} usable cores, {platform.system()} {platform.machine()}",
        "Workers": f"{workers} runs at once",
        "Python": platform.python_version(),
        "Packages": packages(),
        "Code": f"splus and train, sha256 {code_digest()}",
    }


def packages() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)


def training_time(outcomes: Outcomes) -> str:
    seconds = sum(float(o.result.get("seconds") or 0) for o in outcomes.values())
    return f"{len(outcomes)}, {seconds / 60:.1f} minutes of training in all"


def dates(outcomes: Outcomes) -> str:
    times = [path.stat().st_mtime for o in outcomes.values() for path in o.directory.glob("*.*")]
    when = [time.strftime("%Y-%m-%d %H:%M", time.localtime(t)) for t in (min(times), max(times))] if times else ["–"]
    return " to ".join(dict.fromkeys(when))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="left by benchmarks.compare")
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: report.html in DIR; of several, here")
    given = parser.parse_args(arguments)
    output = given.output or (given.folders[0] if len(given.folders) == 1 else Path()) / "report.html"

    def work(console: Console) -> int:
        report = write_report([load(folder) for folder in given.folders], output)
        console.print(f"Report: {report.resolve()}", highlight=False, soft_wrap=True)
        return 0

    run_command(work)


if __name__ == "__main__":
    main()
