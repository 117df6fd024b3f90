"""Trains one configuration in a directory, from wherever it stands to its end."""

import json
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from train import checkpoint
from train.config import training_config
from train.parallel import Ranks
from train.record import Record, Silence
from train.trainer import Trainer

# A loss this many times the first one has left the scale of the problem for good. The three objectives start within a
# factor of 1.5 of what knowing nothing costs.
DIVERGED = 10.0


def run(config: DictConfig, directory: Path, progress: bool = True) -> dict[str, Any]:
    """Train ``config`` in ``directory``, resuming from its checkpoint if there is one; the content of result.json.

    A run that has ended is not run again. A diverged one has ended: its "final" is empty. SIGTERM and Ctrl-C write a
    checkpoint and raise SystemExit. If several processes train together all of them call this, with a directory that
    all of them see; the first one writes, but for its checkpoints.

    Raises:
        ValueError: ``directory`` holds a run of another configuration.
    """
    directory = Path(directory)
    ranks = Ranks.of(config)
    finished: dict[str, Any] | None = ranks.on_first(claim, directory, config)
    if finished is not None:
        return finished
    trainer = Trainer(config)
    resumed = trainer.resume(directory)
    record = Record(directory, config, trainer.step if resumed else None) if ranks.first else Silence()
    with record:
        status = train(trainer, record, directory, progress and ranks.first)
        result: dict[str, Any] = ranks.from_first(summary(trainer, record, status))
    picture = trainer.picture() if status == "finished" else None
    if config.keep_checkpoint:
        trainer.save(directory)
    ranks.on_first(finish, directory, result, picture, config.keep_checkpoint)
    return result


def train(trainer: Trainer, record: Record, directory: Path, progress: bool) -> str:
    """Step to the end, evaluating and saving on the way: "finished" or "diverged"."""
    config = trainer.config
    bar = tqdm(total=config.steps, initial=trainer.step, disable=not progress, unit="step", dynamic_ncols=True)
    with bar, requested_to_stop() as stop:
        if trainer.step == 0:
            evaluate(trainer, record)
        while trainer.step < config.steps:
            loss, lr = trainer.train_step()
            record.train(trainer.step, trainer.clock.seconds, loss, lr)
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
            if diverged(trainer, loss):
                return "diverged"
            if trainer.step % config.evaluate_every == 0 or trainer.step == config.steps:
                evaluate(trainer, record)
            number = trainer.ranks.largest(stop[0] if stop else 0)  # the signal that any of them has received
            if number or trainer.step % config.checkpoint_every == 0:
                trainer.save(directory)
            if number:
                bar.close()
                if trainer.ranks.first:
                    told = f"Stopped at step {trainer.step}; the same command continues from {directory}"
                    print(told, file=sys.stderr)
                raise SystemExit(128 + number)
    return "finished"


def evaluate(trainer: Trainer, record: Record) -> None:
    for weights, seconds, measures in trainer.evaluate():
        record.validation(trainer.step, seconds, weights, measures)


def diverged(trainer: Trainer, loss: float) -> bool:
    assert trainer.first_loss is not None
    return not math.isfinite(loss) or loss > DIVERGED * trainer.first_loss


def summary(trainer: Trainer, record: Record, status: str) -> dict[str, Any]:
    return {
        "status": status,
        "step": trainer.step,
        "steps": trainer.config.steps,
        "seconds": trainer.clock.seconds,
        "parameters": trainer.parameters(),
        "hash": trainer.hash(),
        "final": record.measures(trainer.step) if status == "finished" else {},
    }


def claim(directory: Path, config: DictConfig) -> dict[str, Any] | None:
    """Write config.yaml, or check that the one there is of the same training; its result if it has ended."""
    path, result = directory / "config.yaml", directory / "result.json"
    if path.exists():
        here, given = training_config(OmegaConf.load(path)), training_config(config)  # type: ignore[arg-type]
        differing = sorted(key for key in here | given if here.get(key) != given.get(key))
        if differing:
            raise ValueError(
                f"{directory} holds a run of another configuration (differing in: {', '.join(differing)}); "
                "give another directory, or delete this one"
            )
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(OmegaConf.to_yaml(config, resolve=True), path)
    return json.loads(result.read_text()) if result.exists() else None


def finish(directory: Path, result: dict[str, Any], picture: np.ndarray | None, keep_checkpoint: bool) -> None:
    """Leave what there is to see, then the result, and no checkpoint unless it is to be kept."""
    if picture is not None:
        from matplotlib.image import imsave

        imsave(directory / "samples.png", picture, cmap="gray", vmin=0, vmax=1)
    checkpoint.write_text(json.dumps(result, indent=2) + "\n", directory / "result.json")
    if not keep_checkpoint:
        checkpoint.remove(directory)


@contextmanager
def requested_to_stop() -> Iterator[list[int]]:
    """Collects the first SIGTERM or SIGINT; a second one acts as it did before.

    Signals can be caught in the main thread alone, and one that is ignored stays so.
    """
    received: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    caught = [
        number for number in (signal.SIGTERM, signal.SIGINT) if main and signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.getsignal(number) for number in caught}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def receive(number: int, _: object) -> None:
        received.append(number)
        restore()

    for number in caught:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()
