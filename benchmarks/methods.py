"""What is compared: the files of conf/optimizer/, and variants of them with other settings.

A file may say in a block ``sweep`` how a comparison takes it:

    sweep:
      label: SPlus                                     # default: the file's name
      start: {language_modelling: 0.2, diffusion: 0.4} # the first learning rate by objective; default: lr
      weights: [averaged, live]                        # which it is judged by, a row of the table each
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from benchmarks.cells import ROOT
from benchmarks.command import SettingError

LIVE, AVERAGED = "live", "averaged"
# Of the rows after the first, by their weights.
SUFFIXES = {LIVE: ("_live", " (live)"), AVERAGED: ("_ema", " + EMA")}


@dataclass(frozen=True)
class Row:
    """An optimizer judged by one set of its weights.

    Attributes:
        name: in CSV files, as "adam" and "adam_ema".
        label: for people.
        weights: those that are trained ("live"), or the best of the averages: its own, and those that the training
            loop keeps beside every optimizer ("averaged").
    """

    name: str
    label: str
    weights: str


@dataclass(frozen=True)
class Method:
    """An optimizer with all its settings but the learning rate.

    Attributes:
        settings: Hydra overrides.
        rows: in the order of the table.
        start: the first learning rate that is tried, by objective.
    """

    name: str
    settings: tuple[str, ...]
    rows: tuple[Row, ...]
    start: Mapping[str, float]

    def starting_at(self, rates: Mapping[str, float]) -> Method:
        """With other first learning rates on some objectives."""
        return replace(self, start={**self.start, **rates})


def method(name: str, objectives: Sequence[str], variants: Mapping[str, Any], folder: Path | None = None) -> Method:
    """The method of a file of conf/optimizer/, or of one of ``variants``.

    Args:
        variants: by name, the "optimizer" that is varied, its "settings" and perhaps a "label".
        folder: of the files.

    Raises:
        SettingError: there is neither, or its block "sweep" is none.
    """
    variant = variants.get(name, {})
    optimizer = str(variant.get("optimizer", name))
    config = _load(optimizer, folder or ROOT / "conf" / "optimizer", variants)
    sweep: Mapping[str, Any] = {**config.get("sweep", {}), **variant.get("sweep", {})}
    label = str(variant.get("label", sweep.get("label", optimizer) if optimizer == name else name))
    weights = list(sweep.get("weights") or _default_weights(config))
    if not weights or set(weights) - set(SUFFIXES):
        raise SettingError(f"{optimizer}: sweep.weights={weights} given; some of {', '.join(SUFFIXES)} are required")
    rows = [Row(name, label, weights[0])]
    rows += [Row(name + SUFFIXES[of][0], label + SUFFIXES[of][1], of) for of in weights[1:]]
    start = {objective: _rate(optimizer, objective, sweep, config) for objective in objectives}
    settings = (f"optimizer={optimizer}", *map(str, variant.get("settings", ())))
    return Method(name, settings, tuple(rows), start)


def _load(optimizer: str, folder: Path, variants: Mapping[str, Any]) -> DictConfig:
    path = folder / f"{optimizer}.yaml"
    if not path.exists():
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        raise SettingError(
            f"optimizer {optimizer} given; choose among {', '.join([*known, *variants])}, or write {path}"
        )
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def _default_weights(config: DictConfig) -> list[str]:
    """Optimizers with a mode for evaluation have averages of their own, and live weights are no end in themselves."""
    return [AVERAGED] if hasattr(get_class(config._target_), "eval") else [LIVE, AVERAGED]


def _rate(optimizer: str, objective: str, sweep: Mapping[str, Any], config: DictConfig) -> float:
    rate = float(sweep.get("start", {}).get(objective, config.lr))
    if not (rate > 0 and math.isfinite(rate)):
        raise SettingError(f"{optimizer}: sweep.start.{objective}={rate} given; a positive rate is required")
    return rate
