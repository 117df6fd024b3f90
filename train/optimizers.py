"""Optimizers from configuration, all with the same parameter groups."""

from typing import Any

from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from splus import param_groups
from train.config import build


def build_optimizer(config: DictConfig, model: nn.Module) -> Optimizer:
    """The optimizer of ``config._target_`` on ``model``: weight matrices decay, all other parameters do not."""
    groups = param_groups(model, weight_decay=config.weight_decay, split=getattr(model, "fused", None))
    settings: dict[str, Any] = {}
    if "betas" in config:  # a list in YAML, a pair of floats for torch
        settings["betas"] = tuple(float(beta) for beta in config.betas)
    optimizer: Optimizer = build(config, groups, **settings)
    return optimizer
