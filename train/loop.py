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

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from train import checkpoint
from train.config import training_config
from train.record import Record
from train.trainer import Trainer

# A loss this many times the first one has left the scale of the problem for good. The three objectives start within a
# factor of 1.5 of what knowing nothing costs.
DIVERGED = 10.0


def run(config: DictConfig, directory: Path, progress: bool = True) -> dict[str, Any]:
    """Train ``config`` in ``directory``, resuming from its checkpoint if there is one; the content of result.json.

    A run that has ended is not run again. A diverged one has ended: its "final" is empty. SIGTERM and Ctrl-C write a
    checkpoint and raise SystemExit.

    Raises:
        ValueError: ``directory`` holds a run of another configuration.
    """
    directory = Path(directory)
    result_path = directory / "result.json"
    claim(directory, config)
    if result_path.exists():
        finished: dict[str, Any] = json.loads(result_path.read_text())
        return finished
    trainer = Trainer(config)
    state = checkpoint.load(directory / "checkpoint.pt")
    if state is not None:
        trainer.load_state_dict(state)
    with Record(directory, config, trainer.step if state else None) as record:
        status = train(trainer, record, directory, progress)
        result = summary(trainer, record, status)
    if status == "finished":
        with trainer.averaged_weights():
            trainer.objective.illustrate(trainer.model, directory)
    if config.keep_checkpoint:
        checkpoint.save(trainer.state_dict(), directory / "checkpoint.pt")
    checkpoint.write_text(json.dumps(result, indent=2) + "\n", result_path)
    if not config.keep_checkpoint:
        (directory / "checkpoint.pt").unlink(missing_ok=True)
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
            if stop or trainer.step % config.checkpoint_every == 0:
                checkpoint.save(trainer.state_dict(), directory / "checkpoint.pt")
            if stop:
                bar.close()
                print(f"Stopped at step {trainer.step}; the same command continues from {directory}", file=sys.stderr)
                raise SystemExit(128 + stop[0])
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


def claim(directory: Path, config: DictConfig) -> None:
    """Write config.yaml, or check that the one there is of the same training."""
    path = directory / "config.yaml"
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
