"""A cell is one training run: named, keyed by its whole configuration, kept in a directory of its own."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from benchmarks.machine import processor
from benchmarks.steps_to_adam import Curve
from train.config import config_hash

ROOT = Path(__file__).resolve().parent.parent
ORIGIN = "origin.json"


@dataclass(frozen=True)
class Cell:
    """One run: a readable name, the Hydra overrides that make its configuration, and a group.

    Cells of one group take about the same time; the time left is estimated from it. Weights & Biases groups by it too.
    A cell begins when the one that it comes ``after`` has ended, whose checkpoint it starts from.
    """

    name: str
    overrides: tuple[str, ...]
    group: str = ""
    after: Cell | None = None

    @property
    def config(self) -> DictConfig:
        """The whole configuration, resolved. Not to be changed: equal cells share it."""
        return grouped_config(self.overrides, self.group)

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits that stand for everything that changes the training."""
        return hash_of_config(self.overrides)

    def directory(self, root: Path) -> Path:
        return root / f"{self.name}-{self.hash}"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell. `seconds`: what it took, or its training clock if an earlier command ran it."""

    directory: Path
    status: str  # "finished" | "diverged" | "crashed"
    seconds: float
    result: dict[str, Any]
    error: str = ""

    def loss(self, weights: str) -> float:
        """Final validation loss of one set of weights; infinite when the run diverged."""
        if self.status != "finished":
            return math.inf
        loss = self.result["final"][weights]["loss"]
        return math.inf if loss is None else float(loss)  # null: not finite

    def averages(self) -> list[str]:
        """The averaged weights: the optimizer's own, "averaged", and those kept beside it, "ema_<decay>" each."""
        return sorted(name for name in self.result.get("final", {}) if name != "live")

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Validation over the run, per set of weights."""
        if "curves" in self.result:
            return {weights: Curve(*map(tuple, curve)) for weights, curve in self.result["curves"].items()}
        points: dict[str, list[tuple[int, float, float]]] = {}
        for line in read_metrics(self.directory):
            if line["kind"] == "validation":
                loss = line["loss"] if line["loss"] is not None else math.nan
                points.setdefault(line["weights"], []).append((line["step"], line["seconds"], loss))
        return {weights: Curve(*map(tuple, zip(*sorted(rows)))) for weights, rows in points.items()}


@cache
def compose_config(overrides: tuple[str, ...]) -> DictConfig:
    """The configuration of `python -m train <overrides>`, resolved. Not to be changed: callers share it."""
    GlobalHydra.instance().clear()  # inside hydra.main it holds the configuration of the benchmark itself
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=list(overrides))
    OmegaConf.resolve(config)
    OmegaConf.set_readonly(config, True)
    return config


@cache
def grouped_config(overrides: tuple[str, ...], group: str) -> DictConfig:
    config = compose_config(overrides).copy()
    OmegaConf.set_readonly(config, False)
    config.wandb.group = group or config.wandb.group
    OmegaConf.set_readonly(config, True)
    return config


@cache
def hash_of_config(overrides: tuple[str, ...]) -> str:
    return config_hash(compose_config(overrides))


def earlier_outcome(directory: Path) -> Outcome | None:
    """The outcome of a cell that has already ended, from its result.json."""
    path = directory / "result.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    return Outcome(directory, result["status"], float(result["seconds"]), result)


def known_outcome(cell: Cell, root: Path, recorded: Mapping[str, Outcome] | None) -> Outcome | None:
    """The outcome of a cell that has already ended, from its directory or else by its key from ``recorded``.

    Nothing stands for the directory of one whose checkpoint is wanted.
    """
    elsewhere = {} if compose_config(cell.overrides).keep_checkpoint else recorded or {}
    return earlier_outcome(cell.directory(root)) or elsewhere.get(cell.hash)


def read_metrics(directory: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line still being written is left out."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def last_metrics(directory: Path, tail_bytes: int = 4096) -> tuple[int, float | None]:
    """Step and newest loss of a run in progress, from the last bytes of metrics.jsonl."""
    try:
        with open(directory / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - tail_bytes))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            record = json.loads(line)
            return int(record["step"]), record["loss"]
        except (ValueError, KeyError):  # the tail begins in the middle of a line
            continue
    return 0, None


@cache
def code_digest() -> str:
    """Twelve hexadecimal digits that stand for the code of `splus` and `train` as it is now."""
    digest = hashlib.sha256()
    for path in sorted(path for package in ("splus", "train") for path in (ROOT / package).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def present_origin() -> dict[str, str]:
    """What makes a run here and now: the code of `splus` and `train`, torch, the processor."""
    return {"code": code_digest(), "torch": metadata.version("torch"), "machine": processor()}


def origin(directory: Path) -> dict[str, str]:
    """What the run in a directory was begun by; empty if that is not known."""
    path = directory / ORIGIN
    return dict(json.loads(path.read_text())) if path.exists() else {}


def made_by_other_code(outcome: Outcome) -> bool:
    """Whether the cell was started by another state of `splus` or `train` than the present one."""
    code = origin(outcome.directory).get("code", outcome.result.get("code", code_digest()))
    return bool(code != code_digest())


def finished_earlier(
    wanted: Callable[[Mapping[Cell, Outcome]], Sequence[Cell]],
    root: Path,
    recorded: Mapping[str, Outcome] | None = None,
) -> dict[Cell, Outcome]:
    """The wanted cells that earlier commands have ended, and those wanted because of them."""
    outcomes: dict[Cell, Outcome] = {}
    while True:
        new = {
            cell: outcome
            for cell in wanted(outcomes)
            if cell not in outcomes and (outcome := known_outcome(cell, root, recorded))
        }
        if not new:
            return outcomes
        outcomes |= new
