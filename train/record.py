"""What a run leaves for others to read: JSON lines always, Weights & Biases when asked for."""

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from train.checkpoint import write_text
from train.config import config_hash, training_config


class Record:
    """The lines of ``metrics.jsonl``. Resumed at a step, it first cuts off the lines after it."""

    def __init__(self, directory: Path, config: DictConfig, resumed_at: int | None) -> None:
        self.path = directory / "metrics.jsonl"
        kept = [] if resumed_at is None else [line for line in self.lines() if line["step"] <= resumed_at]
        write_text("".join(json.dumps(line) + "\n" for line in kept), self.path)
        self.file = self.path.open("a", buffering=1)  # a line at a time, for those who read along
        self.wandb = start_wandb(directory, config) if config.wandb.mode != "disabled" else None

    def train(self, step: int, seconds: float, loss: float, lr: float) -> None:
        self.write({"kind": "train", "step": step, "seconds": seconds, "loss": loss, "lr": lr})
        if self.wandb is not None:
            self.wandb.log({"train/loss": loss, "train/lr": lr, "seconds": seconds}, step=step)

    def validation(self, step: int, seconds: float, weights: str, measures: dict[str, float]) -> None:
        self.write({"kind": "validation", "step": step, "seconds": seconds, "weights": weights, **measures})
        if self.wandb is not None:
            self.wandb.log({f"validation/{weights}/{name}": value for name, value in measures.items()}, step=step)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; numbers that JSON lacks (nan, inf) become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self.file.write(json.dumps(finite) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """The complete lines so far: what follows the last line end was cut short by a kill."""
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def measures(self, step: int) -> dict[str, dict[str, float]]:
        """Per set of weights, what the evaluation at ``step`` measured."""
        lines = [line for line in self.lines() if line["kind"] == "validation" and line["step"] == step]
        about = ("kind", "step", "seconds", "weights")
        return {line["weights"]: {k: v for k, v in line.items() if k not in about} for line in lines}

    def __enter__(self) -> "Record":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=0 if kind is None else 1)


class Silence(Record):
    """The record of the ranks that leave the writing to the first."""

    def __init__(self) -> None:
        self.wandb = None

    def write(self, line: dict[str, Any]) -> None:
        pass

    def lines(self) -> list[dict[str, Any]]:
        return []

    def __exit__(self, *_: object) -> None:
        pass


def start_wandb(directory: Path, config: DictConfig) -> Any:
    import wandb

    return wandb.init(
        project=config.wandb.project,
        mode=config.wandb.mode,
        group=config.wandb.group,
        name=directory.name,
        id=f"{directory.name}-{config_hash(config)}",
        resume="allow",
        dir=directory,
        config=training_config(config),
        settings=wandb.Settings(silent=True),
    )
