"""One training in progress: everything that a step changes and a checkpoint keeps."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Generator, Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from splus.averaging import averaging_weight
from train import checkpoint
from train.config import build
from train.objectives import Objective
from train.optimizers import build_optimizer, graph_of_gradients


def generator(*position: object) -> Generator:
    """A generator of its own for each position, such as (seed, "batch", 7): nothing to save, nothing to restore."""
    digest = hashlib.sha256(repr(position).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:4], "big"))  # torch's CPU generator takes 32 bits


class Clock:
    """Seconds spent in ``with clock:`` so far."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.device = 0.0, device

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> "Clock":
        self.started = self.now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self.now() - self.started


class Averages:
    """Bias-corrected averages of a model's weights, for optimizers without their own: one per decay, off the clock."""

    def __init__(self, model: torch.nn.Module, decays: list[float], device: torch.device) -> None:
        self.models = {decay: AveragedModel(model, multi_avg_fn=lerp_towards(decay)) for decay in decays}
        self.clock = Clock(device)

    def update(self, model: torch.nn.Module) -> None:
        with self.clock:
            for averaged in self.models.values():
                averaged.update_parameters(model)

    @property
    def seconds_each(self) -> float:
        """What keeping one of the averages has cost so far."""
        return self.clock.seconds / max(1, len(self.models))


def lerp_towards(decay: float) -> Any:
    """The update of a bias-corrected average for AveragedModel, which has itself copied the weights of step 1."""

    def update(averages: list[Tensor], weights: list[Tensor], updates_before: Tensor | int) -> None:
        torch._foreach_lerp_(averages, weights, averaging_weight(decay, int(updates_before) + 1))

    return update


class Trainer:
    """Model, optimizer, schedule and averages of one configuration, at some step.

    Initialisation and data depend on ``config.seed`` alone. Step s (from 0) trains on the batch of generator
    (seed, "batch", s), so that the step is the whole position in the data.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(config.seed)  # for optimizers that draw numbers; the harness has generators of its own
        data = build(config.data)
        self.objective: Objective = build(config.objective, data, config.validation_examples, self.device)
        self.model: torch.nn.Module = build(config.model, **data.sizes, generator=generator(config.seed, "weights"))
        self.model.to(self.device)
        self.optimizer = build_optimizer(config.optimizer, self.model)
        self.scheduler = LambdaLR(self.optimizer, build(config.schedule))
        self.has_own_averages = hasattr(self.optimizer, "eval")
        decays = [] if self.has_own_averages else list(config.averaging_decays)
        self.averages = Averages(self.model, decays, self.device)
        self.clock = Clock(self.device)
        self.step = 0
        self.first_loss: float | None = None

    def train_step(self) -> tuple[float, float]:
        """One step; the loss before it and the learning rate it took."""
        with self.clock:
            batch = self.objective.batch(self.config.batch_size, generator(self.config.seed, "batch", self.step))
            loss = self.backward(batch)
            lr = float(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        self.averages.update(self.model)
        self.step += 1
        self.first_loss = loss if self.first_loss is None else self.first_loss
        return loss, lr

    def backward(self, batch: tuple[Tensor, ...]) -> float:
        """Gradients of the mean loss over the batch, a micro-batch at a time; that loss."""
        size = self.config.batch_size
        parts = zip(*(tensor.split(self.config.micro_batch or size) for tensor in batch), strict=True)
        total = torch.zeros((), device=self.device)
        with graph_of_gradients(self.optimizer) as create_graph:
            for part in parts:
                loss = self.objective.loss(self.model, part) * (len(part[0]) / size)
                loss.backward(create_graph=create_graph)
                total += loss.detach()
        return float(total)

    def evaluate(self) -> Iterator[tuple[str, float, dict[str, float]]]:
        """Name, clock and measures of each set of weights there is."""
        yield "live", self.clock.seconds, self.objective.evaluate(self.model)
        if self.has_own_averages:
            with self.averaged_weights():
                yield "averaged", self.clock.seconds, self.objective.evaluate(self.model)
        for decay, averaged in self.averages.models.items():
            seconds = self.clock.seconds + self.averages.seconds_each
            yield f"ema_{decay}", seconds, self.objective.evaluate(averaged.module)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The optimizer's averages in the model, if it has any; getting them there and back is on the clock."""
        if not self.has_own_averages:
            yield
            return
        with self.clock:
            self.optimizer.eval()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            with self.clock:
                self.optimizer.train()  # type: ignore[attr-defined]

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def hash(self) -> str:
        """sha256 of the live weights."""
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "averages": {str(decay): model.state_dict() for decay, model in self.averages.models.items()},
            "seconds": [self.clock.seconds, self.averages.clock.seconds],
            "first_loss": self.first_loss,
            "random": checkpoint.random_states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.first_loss = state["step"], state["first_loss"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        for decay, model in self.averages.models.items():
            model.load_state_dict(state["averages"][str(decay)])
        self.clock.seconds, self.averages.clock.seconds = state["seconds"]
        checkpoint.set_random_states(state["random"])
