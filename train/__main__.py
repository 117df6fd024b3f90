"""python -m train objective=language_modelling optimizer=splus preset=quick [any.setting=value ...]

Trains one configuration of conf/ and prints what it reaches. The same command continues a run that was stopped.
On several processes: torchrun --nproc-per-node=2 -m train parallel=ddp …
Several configurations at once: python -m train -m optimizer=adam,splus hydra/launcher=joblib
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from train.config import config_hash
from train.loop import run
from train.parallel import Ranks, joined


@hydra.main(config_path="../conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    if config.directory is None:
        choices = HydraConfig.get().runtime.choices
        config.directory = f"runs/{choices['objective']}-{choices['optimizer']}-{config_hash(config)}"
    directory = Path(config.directory)
    alone = HydraConfig.get().mode == RunMode.RUN  # the bars of several runs would overwrite each other
    with errors_kept(directory), joined(config.parallel):
        first = Ranks.of(config).first
        if first:
            print(f"{config.steps} steps into {directory} ({config.preset.expected})")
        result = run(config, directory, progress=alone)
    if first:
        report(result, directory)


@contextmanager
def errors_kept(directory: Path) -> Iterator[None]:
    """Tracebacks, of any rank, are also in the directory's error.txt until the run has ended well."""
    errors = directory / "error.txt"
    try:
        yield
    except Exception:
        directory.mkdir(parents=True, exist_ok=True)
        with errors.open("a") as file:
            file.write(traceback.format_exc())
        raise
    errors.unlink(missing_ok=True)


def report(result: dict[str, Any], directory: Path) -> None:
    print(f"{result['status']} at step {result['step']} of {result['steps']}: {result['seconds']:.1f} s of training")
    for weights, measures in result["final"].items():
        print(f"  {weights:10}", "  ".join(f"{name} {value:.4f}" for name, value in measures.items()))
    print(f"Metrics, configuration and result: {directory}")


if __name__ == "__main__":
    main()
