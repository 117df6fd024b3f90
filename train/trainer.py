"""One training in progress: everything that a step changes and a checkpoint keeps."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Generator, Tensor
from torch.optim.lr_scheduler import LambdaLR

from splus.averaging import averaging_weight
from splus.owned import full
from splus.teams import local
from train import checkpoint
from train.config import build
from train.objectives import Objective
from train.optimizers import build_optimizer, check_parallel, graph_of_gradients
from train.parallel import Ranks, local_device, spread


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
    """Bias-corrected averages of a model's weights, for optimizers without their own: one per decay, off the clock.

    Attributes:
        of: for each decay, the averages by the names of the weights, spread over ranks as they are.
    """

    def __init__(self, model: torch.nn.Module, decays: list[float], device: torch.device) -> None:
        self.weights = dict(model.named_parameters())
        self.of = {decay: {name: w.detach().clone() for name, w in self.weights.items()} for decay in decays}
        self.clock = Clock(device)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` steps."""
        with self.clock:
            for decay, averages in self.of.items():
                pairs = self._pairs(averages)
                torch._foreach_lerp_([a for _, a in pairs], [w for w, _ in pairs], averaging_weight(decay, step))

    @contextmanager
    def in_model(self, decay: float) -> Iterator[None]:
        """An average in the model inside, the weights themselves, bit for bit, outside."""
        self._exchange(decay)
        try:
            yield
        finally:
            self._exchange(decay)

    @torch.no_grad()
    def _exchange(self, decay: float) -> None:
        for weight, average in self._pairs(self.of[decay]):
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)

    def _pairs(self, averages: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What this rank holds of weights and averages."""
        return [(local(weight), local(averages[name])) for name, weight in self.weights.items()]

    @property
    def seconds_each(self) -> float:
        """What keeping one of the averages has cost so far."""
        return self.clock.seconds / max(1, len(self.of))


class Trainer:
    """Model, optimizer, schedule and averages of one configuration, at some step.

    Initialisation and data depend on ``config.seed`` alone. Step s (from 0) trains on the batch of generator
    (seed, "batch", s), so that the step is the whole position in the data. Every rank draws the whole batch and takes
    its rows, so that the numbers of an example are those of one process.
    """

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.ranks = Ranks.of(config)
        check_parallel(config)
        self.device = local_device()
        torch.manual_seed(config.seed)  # for optimizers that draw numbers; the harness has generators of its own
        data = build(config.data)
        self.objective: Objective = build(config.objective, data, config.validation_examples, self.device)
        self.model: torch.nn.Module = build(config.model, **data.sizes, generator=generator(config.seed, "weights"))
        self.model.to(self.device)
        self.spread = spread(self.model, config.parallel, self.device)
        self.optimizer = build_optimizer(config.optimizer, self.model, self.spread.process_group)
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
        self.step += 1
        self.averages.update(self.step)
        self.first_loss = loss if self.first_loss is None else self.first_loss
        return loss, lr

    def backward(self, batch: tuple[Tensor, ...]) -> float:
        """Gradients of the mean loss over the batch, a micro-batch of this rank's rows at a time; that loss."""
        rows = self.ranks.rows(batch)
        size = len(rows[0])
        parts = list(zip(*(tensor.split(self.config.micro_batch or size) for tensor in rows), strict=True))
        total = torch.zeros((), device=self.device)
        with graph_of_gradients(self.optimizer) as create_graph:
            for number, part in enumerate(parts, 1):
                with self.spread.gradients(last=number == len(parts)):
                    loss = self.objective.loss(self.spread.module, part) * (len(part[0]) / size)
                    loss.backward(create_graph=create_graph)
                total += loss.detach()
        return self.ranks.sums([float(total)])[0] / self.ranks.number

    def evaluate(self) -> Iterator[tuple[str, float, dict[str, float]]]:
        """Name, clock and measures of each set of weights there is."""
        for name, seconds in self.each_weights():
            yield name, seconds, self.measures()

    def each_weights(self) -> Iterator[tuple[str, float]]:
        """Name and clock of each set of weights there is, which is in the model until the next is asked for."""
        yield "live", self.clock.seconds
        if self.has_own_averages:
            with self.averaged_weights():
                yield "averaged", self.clock.seconds
        for decay in self.averages.of:
            with self.averages.in_model(decay):
                yield f"ema_{decay}", self.clock.seconds + self.averages.seconds_each

    def measures(self) -> dict[str, float]:
        """Of the weights that are in the model, on the held-out set."""
        measures = self.objective.evaluate(self.model, self.ranks)
        self.spread.reshard()
        return measures

    def picture(self) -> np.ndarray | None:
        """What there is to see of the averaged weights."""
        with self.averaged_weights():
            picture = self.objective.picture(self.model)
            self.spread.reshard()
        return picture

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
        """sha256 of the live weights, whole; another number of ranks rounds them in other ways. On all ranks."""
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(full(tensor, None).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, directory: Path) -> None:
        """Leave a checkpoint in ``directory``; on all ranks."""
        checkpoint.save(self.state_dict(), directory, self.step, self.ranks)

    def resume(self, directory: Path) -> bool:
        """Continue from the checkpoint in ``directory``, of any ranks; whether there is one. On all ranks."""
        path = self.ranks.on_first(checkpoint.newest, directory)
        if path is not None:
            self.load_state_dict(checkpoint.load(self.state_dict(), path))
        return path is not None

    def state_dict(self) -> dict[str, Any]:
        """Tensors by the names of the model's parameters, spread over ranks as they are; the rest is rank 0's text."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        progress = {
            "step": self.step,
            "scheduler": self.scheduler.state_dict(),
            "seconds": [self.clock.seconds, self.averages.clock.seconds],
            "first_loss": self.first_loss,
            "random": checkpoint.random_states(),
        }
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "averages": {str(decay): averages for decay, averages in self.averages.of.items()},
            "progress": self.ranks.from_first(json.dumps(progress)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        for decay, averages in self.averages.of.items():
            for name, average in averages.items():
                local(average).copy_(local(state["averages"][str(decay)][name]))
        progress = json.loads(state["progress"])
        self.step, self.first_loss = progress["step"], progress["first_loss"]
        self.scheduler.load_state_dict(progress["scheduler"])
        self.clock.seconds, self.averages.clock.seconds = progress["seconds"]
        checkpoint.set_random_states(progress["random"])
