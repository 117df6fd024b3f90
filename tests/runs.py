"""Configurations of runs, as `python -m train` makes them."""

from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import train.config  # noqa: F401  (registers the resolvers)

ROOT = Path(__file__).resolve().parent.parent
OBJECTIVES = ("language_modelling", "image_classification", "diffusion")


def configuration(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@cache
def optimizer_file(name: str) -> DictConfig:
    """A file of conf/optimizer/ with those that it builds on. Not to be changed."""
    with initialize_config_dir(str(ROOT / "conf" / "optimizer"), version_base="1.3"):
        config = compose(name)
    OmegaConf.set_struct(config, False)
    return config


def smoke(objective: str = "language_modelling", optimizer: str = "adam", *overrides: str) -> DictConfig:
    return configuration("preset=smoke", f"objective={objective}", f"optimizer={optimizer}", *overrides)
