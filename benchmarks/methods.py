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
from dataclasses import dataclass
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_class
from omegaconf import DictConfig

from benchmarks.cells import ROOT
from benchmarks.command import SettingError

FOLDER = ROOT / "conf" / "optimizer"
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


def method_name(row: str) -> str:
    """Of the method of a row, by the row's name."""
    return row.removesuffix("_ema").removesuffix("_live")


def method(
    name: str, objectives: Sequence[str], variants: Mapping[str, Any], first_rates: Mapping[str, Any] | None = None
) -> Method:
    """The method of a file of conf/optimizer/, or of one of ``variants``.

    Args:
        variants: by name, the "optimizer" that is varied, its "settings" and perhaps a "label".
        first_rates: by objective and method, first learning rates instead of the file's.

    Raises:
        SettingError: there is neither, its block "sweep" is none, or a rate is not positive.
    """
    variant = variants.get(name, {})
    optimizer = str(variant.get("optimizer", name))
    config = _load(optimizer, variants)
    sweep: Mapping[str, Any] = {**config.get("sweep", {}), **variant.get("sweep", {})}
    label = str(variant.get("label", sweep.get("label", optimizer) if optimizer == name else name))
    weights = list(sweep.get("weights") or _default_weights(config))
    if not weights or set(weights) - set(SUFFIXES):
        raise SettingError(f"{optimizer}: sweep.weights={weights} given; some of {', '.join(SUFFIXES)} are required")
    rows = [Row(name, label, weights[0])]
    rows += [Row(name + SUFFIXES[of][0], label + SUFFIXES[of][1], of) for of in weights[1:]]
    own = {objective: sweep.get("start", {}).get(objective, config.lr) for objective in objectives}
    given = {objective: rates[name] for objective, rates in (first_rates or {}).items() if name in rates}
    start = {objective: float(given.get(objective, rate)) for objective, rate in own.items()}
    for objective, rate in start.items():
        if not (rate > 0 and math.isfinite(rate)):
            raise SettingError(f"first learning rate {rate} of {name} on {objective} given; a positive one is required")
    settings = (f"optimizer={optimizer}", *map(str, variant.get("settings", ())))
    return Method(name, settings, tuple(rows), start)


def _load(optimizer: str, variants: Mapping[str, Any]) -> DictConfig:
    path = FOLDER / f"{optimizer}.yaml"
    if not path.exists():
        known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
        raise SettingError(
            f"optimizer {optimizer} given; choose among {', '.join([*known, *variants])}, or write {path}"
        )
    GlobalHydra.instance().clear()  # inside hydra.main it holds the configuration of the benchmark itself
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        return compose(optimizer)


def _default_weights(config: DictConfig) -> list[str]:
    """Optimizers with a mode for evaluation have averages of their own, and live weights are no end in themselves."""
    return [AVERAGED] if hasattr(get_class(config._target_), "eval") else [LIVE, AVERAGED]
