"""Optimizers from configuration, all with the same parameter groups."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Muon, Optimizer

from splus import SPlus, param_groups
from train.config import BESIDE, build


def build_optimizer(config: DictConfig, model: nn.Module, process_group: ProcessGroup | None = None) -> Optimizer:
    """The optimizer of ``config._target_`` on ``model``: weight matrices decay, all other parameters do not.

    ``config.groups`` has further options of the groups by their names, such as ``{"head": {"lr": 0.1}}``. An SPlus
    shares its work among the ranks of ``process_group``, which all hold the model. An optimizer that has modes is in
    the one for training.

    Raises:
        ValueError: options for a group that the model does not have; no ``weight_decay``.
    """
    if "weight_decay" not in config:
        raise ValueError(
            f"optimizer {config._target_} has no weight_decay; add that of weight matrices to its file, or 0"
        )
    groups = param_groups(model, weight_decay=config.weight_decay, split=getattr(model, "fused", None))
    add_options(groups, config.get("groups", {}))
    settings: dict[str, Any] = {}
    if process_group is not None and issubclass(get_class(config._target_), SPlus):
        settings["process_group"] = process_group
    if "betas" in config:  # a list in YAML, a pair of floats for torch
        settings["betas"] = tuple(float(beta) for beta in config.betas)
    optimizer: Optimizer = build(arguments(config), groups, **settings)
    if hasattr(optimizer, "train"):
        optimizer.train()
        # Schedule-Free leaves empty states, for which torch.distributed.checkpoint would take the state as made.
        for parameter in [parameter for parameter, state in optimizer.state.items() if not state]:
            del optimizer.state[parameter]
    return optimizer


def arguments(config: DictConfig) -> DictConfig:
    """The target and its arguments."""
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    return OmegaConf.create({key: value for key, value in resolved.items() if key not in ("groups", *BESIDE)})


def check_parallel(config: DictConfig) -> None:
    """Raise a ValueError if the optimizer's file has a list ``parallel`` that ``config.parallel.mode`` is not in."""
    allowed = config.optimizer.get("parallel")
    if allowed is not None and config.parallel.mode not in allowed:
        raise ValueError(
            f"{config.optimizer._target_} does not work with parallel={config.parallel.mode} (docs/baselines.md); "
            f"set parallel={' or parallel='.join(allowed)}, or take one that does, such as splus or adam"
        )


@contextmanager
def graph_of_gradients(optimizer: Optimizer) -> Iterator[bool]:
    """Whether the next step differentiates the gradients once more, as its ``differentiates_gradients`` says.

    Attention inside is of the kind that allows it.
    """
    if not getattr(optimizer, "differentiates_gradients", False):
        yield False
        return
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True")
        yield True


def add_options(groups: list[dict[str, Any]], options: DictConfig) -> None:
    """In place, give groups the options that stand under their names."""
    named = {group["name"]: group for group in groups}
    for name, of_group in ((str(key), value) for key, value in options.items()):
        if name not in named:
            raise ValueError(f"optimizer.groups.{name} is given; the groups of this model are {', '.join(named)}")
        named[name].update(of_group)


class MuonWithAdam(Optimizer):
    """:class:`torch.optim.Muon` for the whitened matrices and :class:`torch.optim.AdamW` for all other parameters.

    Fused projections are orthogonalised whole.

    Args:
        groups: of :func:`splus.param_groups`.
        lr: of Muon.
        weight_decay: of groups that have none of their own.
        adam_lr: of AdamW, in units of ``lr``, so that one schedule and one sweep serve both.
        adam_betas: of AdamW.
        options: of Muon.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        adam_lr: float,
        adam_betas: tuple[float, float],
        **options: Any,
    ) -> None:
        self._muon_options, self._adam_betas = options, (adam_betas[0], adam_betas[1])
        for group in groups:
            group["lr"] = lr * (1 if group["name"] == "whitened" else adam_lr)
        super().__init__(groups, {"weight_decay": weight_decay})
        self._link()

    def _link(self) -> None:
        """Make the two optimizers anew on the groups and the state there are."""
        muon = [group for group in self.param_groups if group["name"] == "whitened"]
        adam = [group for group in self.param_groups if group["name"] != "whitened"]
        self._parts: list[Optimizer] = [
            Muon(muon, **self._muon_options),
            AdamW(adam, betas=self._adam_betas, fused=True),
        ]
        for part in self._parts:
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._link()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
