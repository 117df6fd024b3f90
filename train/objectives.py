"""The three objectives: a loss to train, measures on a fixed held-out set, and what there is to see at the end."""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Generator, Tensor, nn

from train.data.text import Text
from train.parallel import Ranks

EVALUATION_BATCH = 256
LABEL_DROPOUT = 0.1  # DiT and the paper's experiments
SAMPLING_STEPS = 32
SAMPLING_BATCH = 256
LABELS_SHOWN = 10  # of the samples' picture
SAMPLES_PER_LABEL = 8


class LabelledImages(Protocol):
    """Pixels or latents (N, C, Y, X), labels (N,)."""

    @property
    def sizes(self) -> dict[str, int]: ...

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]: ...

    def validation(self, examples: int) -> tuple[Tensor, Tensor]: ...


class Objective:
    """A loss on batches of ``data`` and measures on its first ``examples`` held-out examples.

    A batch is a tuple of tensors of one length, on the device of the model.
    """

    def __init__(self, data: Any, examples: int, device: torch.device) -> None:
        self.data, self.device = data, device
        self.held_out = self.to_device(self.validation_set(examples))

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, ...]:
        """A training batch, drawn from ``generator`` and nothing else."""
        raise NotImplementedError

    def validation_set(self, examples: int) -> tuple[Tensor, ...]:
        """The held-out examples, the same in every run."""
        raise NotImplementedError

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        """Scalar means over the batch; "loss" among them."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return self.losses(model, *batch)["loss"]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ranks: Ranks) -> dict[str, float]:
        """Means over the held-out set, of which each rank measures every n-th example.

        Where some have one less, they measure another instead, that does not count: all go through a model that is
        spread over them as often.
        """
        examples = len(self.held_out[0])
        mine = torch.arange(ranks.rank, examples, ranks.number)
        totals: dict[str, float] = {}
        for start in range(0, -(-examples // ranks.number), EVALUATION_BATCH):
            rows = mine[start : start + EVALUATION_BATCH]
            chosen = (rows if len(rows) else mine.new_zeros(1)).to(self.device)
            for name, value in self.losses(model, *(tensor[chosen] for tensor in self.held_out)).items():
                totals[name] = totals.get(name, 0.0) + float(value) * len(rows)
        sums = ranks.sums(list(totals.values()))
        return {name: total / examples for name, total in zip(totals, sums)}

    def picture(self, model: nn.Module) -> np.ndarray | None:
        """What is to be seen of a trained model, a grey image; None if there is nothing."""
        return None

    def to_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in batch)


class LanguageModelling(Objective):
    """Cross-entropy of the next byte or token, in nats; and in bits per byte, by the bytes of a held-out token."""

    data: Text

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, ...]:
        return self.to_device((self.data.batch(size, generator),))

    def validation_set(self, examples: int) -> tuple[Tensor, ...]:
        return (self.data.validation(examples),)

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        (windows,) = batch  # (B, T + 1)
        logits = model(windows[:, :-1])  # (B, T, vocabulary)
        loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        return {"loss": loss, "bits_per_byte": loss.detach() / (math.log(2) * self.data.bytes_per_token)}


class ImageClassification(Objective):
    """Cross-entropy of the label, and accuracy."""

    data: LabelledImages

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, ...]:
        return self.to_device(self.data.batch(size, generator))

    def validation_set(self, examples: int) -> tuple[Tensor, ...]:
        return self.data.validation(examples)

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        images, labels = batch  # (B, C, Y, X), (B,)
        logits = model(images).float()  # (B, classes)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


class Diffusion(Objective):
    """Flow matching (arXiv 2210.02747): the squared error of the velocity on the straight line from noise to image.

    Held-out noise is fixed and held-out times are evenly spaced, so that two evaluations differ by the weights alone.
    """

    data: LabelledImages

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, ...]:
        images, labels = self.data.batch(size, generator)
        noise = torch.randn(images.shape, generator=generator)
        times = torch.rand(size, generator=generator)
        dropped = torch.rand(size, generator=generator) < LABEL_DROPOUT
        labels = labels.masked_fill(dropped, self.data.sizes["classes"])
        return self.to_device((images, labels, noise, times))

    def validation_set(self, examples: int) -> tuple[Tensor, ...]:
        images, labels = self.data.validation(examples)
        noise = torch.randn(images.shape, generator=Generator().manual_seed(0))
        times = (torch.arange(examples) + 0.5) / examples
        return images, labels, noise, times

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        images, labels, noise, times = batch  # (B, C, Y, X), (B,), (B, C, Y, X), (B,)
        t = rearrange(times, "b -> b 1 1 1")
        velocity = model(torch.lerp(noise, images, t), times, labels)  # (B, C, Y, X)
        return {"loss": F.mse_loss(velocity.float(), images - noise)}

    @torch.no_grad()
    def samples(self, model: nn.Module, labels: Tensor, guidance: float = 1.0) -> Iterator[Tensor]:
        """Images in [-1, 1] of the given labels (B,), by Euler steps from fixed noise, in batches (b, C, Y, X).

        With ``guidance`` w the velocity is v(∅) + w · (v(label) - v(∅)), ∅ the label of those dropped in training:
        classifier-free guidance (arXiv 2207.12598, whose own weight is w - 1). 1 samples the conditional model.
        """
        noise = Generator().manual_seed(0)
        for part in labels.to(self.device).split(SAMPLING_BATCH):
            shape = (len(part), *self.held_out[0].shape[1:])
            x = torch.randn(shape, generator=noise).to(self.device)
            for step in range(SAMPLING_STEPS):
                times = torch.full((len(part),), step / SAMPLING_STEPS, device=self.device)
                x = x + self.velocity(model, x, times, part, guidance) / SAMPLING_STEPS
            yield x.clamp(-1, 1)

    def velocity(self, model: nn.Module, x: Tensor, times: Tensor, labels: Tensor, guidance: float) -> Tensor:
        """The guided velocity (B, C, Y, X) at x (B, C, Y, X)."""
        if guidance == 1:
            velocity: Tensor = model(x, times, labels)
            return velocity
        none = torch.full_like(labels, self.data.sizes["classes"])
        both = model(torch.cat([x, x]), torch.cat([times, times]), torch.cat([labels, none]))  # (2B, C, Y, X)
        conditional, unconditional = both.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def picture(self, model: nn.Module) -> np.ndarray | None:
        """A row of samples for each label, or for the first of many; None for latents, which show nothing."""
        if self.data.sizes["channels"] not in (1, 3):
            return None
        classes = min(self.data.sizes["classes"], LABELS_SHOWN)
        labels = torch.arange(classes, device=self.device).repeat_interleave(SAMPLES_PER_LABEL)
        images = (torch.cat(list(self.samples(model, labels))) + 1) / 2  # (B, C, Y, X) in [0, 1]
        images = repeat(images, "b c y x -> b c (y 2) (x 2)")  # larger, to be looked at
        grid: np.ndarray = rearrange(images, "(r n) c y x -> (r y) (n x) c", r=classes).cpu().squeeze(-1).numpy()
        return grid
