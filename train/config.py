"""What the configuration files need from code: resolvers, building by `_target_`, a hash."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

# Where a run is kept and watched and what it runs on, which change nothing in it.
OUTSIDE = ("directory", "keep_checkpoint", "checkpoint_every", "wandb", "parallel")
# What an optimizer's file says beside its arguments and changes nothing in a run either: where a sweep of the learning
# rate begins, by objective; the modes of parallel that it works with, if not all.
BESIDE = ("sweep", "parallel")


def averaging_decay(steps: int) -> float:
    """A horizon of 10% of the run, as the paper's 0.999 is of its 10,000 steps."""
    return min(0.999, max(0.5, 1 - 10 / steps))


def heads(width: int, head_size: int) -> int:
    if width % head_size:
        raise ValueError(f"model.width={width} is not a multiple of preset.head_size={head_size}; change one")
    return width // head_size


OmegaConf.register_new_resolver("averaging_decay", averaging_decay, replace=True)
OmegaConf.register_new_resolver("heads", heads, replace=True)


def build(config: DictConfig, *arguments: Any, **settings: Any) -> Any:
    """Call the config's `_target_` with its settings and these; tensors among these are passed on untouched."""
    return instantiate(config, _partial_=True, _convert_="all")(*arguments, **settings)


def training_config(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration, less what changes nothing in the training.

    The run whose weights it starts from is in it by its key, wherever it is kept.
    """
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    for key in BESIDE:
        resolved["optimizer"].pop(key, None)
    start = resolved.pop("start", None) or {}
    inside = {str(key): value for key, value in resolved.items() if key not in OUTSIDE}
    if start.get("directory") is not None:
        inside["start"] = start["key"] or run_key(Path(start["directory"]))
    return inside


def run_key(directory: Path) -> str:
    """The hash of the configuration of the run in a directory.

    Raises:
        ValueError: there is none.
    """
    path = directory / "config.yaml"
    if not path.exists():
        raise ValueError(
            f"start.directory={directory} given, which holds no run; "
            "give the directory of one that was trained with keep_checkpoint=true"
        )
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config_hash(config)


def config_hash(config: DictConfig) -> str:
    """Eight hexadecimal digits that stand for everything that changes the training."""
    return hashlib.sha256(json.dumps(training_config(config), sort_keys=True).encode()).hexdigest()[:8]
