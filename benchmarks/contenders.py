"""The optimizers and the parameter sets that :mod:`benchmarks.step_time` times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from splus import SPlus

# The refresh period of every optimizer that has one: SPlus's and SOAP's default.
PERIOD = 10


@dataclass(frozen=True)
class ParameterSet:
    """Shapes of the matrices that are whitened, and of all other parameters."""

    matrices: Sequence[tuple[int, int]]
    others: Sequence[tuple[int, ...]] = ()

    @property
    def entries(self) -> int:
        return sum(torch.Size(shape).numel() for shape in (*self.matrices, *self.others))

    def largest_buckets(self, count: int) -> int:
        """Entries of the matrices of the ``count`` shapes that have the most."""
        sizes = [shape[0] * shape[1] * self.matrices.count(shape) for shape in set(self.matrices)]
        return sum(sorted(sizes)[-count:])


def transformer(layers: int, width: int, vocabulary: int = 0, context: int = 0) -> ParameterSet:
    """q, k, v, output projection and a fourfold MLP a layer, norms; with a vocabulary also embeddings."""
    layer = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    embeddings = [(vocabulary, width), (context, width)] if vocabulary else []
    return ParameterSet(layer * layers, [*embeddings, *[(width,)] * (2 * layers + 1)])


def resnet18() -> ParameterSet:
    """The convolutions of ResNet-18 (arXiv 1512.03385, table 1) as (out, in·k·k), its BatchNorms and its head."""
    convolutions, others, inputs = [(64, 3 * 49)], [(64,), (64,)], 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            convolutions += [(width, inputs * 9), (width, width * 9)]
            if inputs != width:
                convolutions.append((width, inputs))
                others += [(width,)] * 2
            others += [(width,)] * 4
            inputs = width
    return ParameterSet(convolutions, [*others, (1000, 512), (1000,)])


SETS: dict[str, Callable[[], ParameterSet]] = {
    "large": lambda: transformer(6, 384),
    "many": lambda: transformer(12, 128, vocabulary=8192, context=256),
    "conv": resnet18,
    "gpt2": lambda: transformer(12, 768, vocabulary=50257, context=1024),
}


@dataclass(frozen=True)
class Contender:
    """An optimizer by name. ``make`` takes matrices and other parameters; ``period`` names the option of the refreshes.

    ``without`` are the group options that suspend its refreshes.
    """

    name: str
    make: Callable[[list[Tensor], list[Tensor]], list[Optimizer]]
    period: str | None = None
    without: dict[str, Any] = field(default_factory=dict)


NEVER = 10**9


def splus(name: str, **options: Any) -> Contender:
    def make(matrices: list[Tensor], others: list[Tensor]) -> list[Optimizer]:
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "whiten": False}]
        return [SPlus(groups, **options)]

    return Contender(name, make, "precondition_frequency", {"precondition_frequency": NEVER, "refresh_growth": None})


def _adamw(matrices: list[Tensor], others: list[Tensor]) -> list[Optimizer]:
    return [AdamW([*matrices, *others], fused=True)]


def _published_splus(matrices: list[Tensor], others: list[Tensor]) -> list[Optimizer]:
    # A side of max_dim or more is not rotated: its embeddings and head take the elementwise rule, as ours do.
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "max_dim": 1}]
    return [pytorch_optimizer.SPlus(groups, inverse_steps=PERIOD)]


def _soap(matrices: list[Tensor], others: list[Tensor]) -> list[Optimizer]:
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "max_precondition_dim": 1}]
    return [pytorch_optimizer.SOAP(groups, precondition_frequency=PERIOD)]


def _muon(matrices: list[Tensor], others: list[Tensor]) -> list[Optimizer]:
    return [Muon(matrices), AdamW(others, fused=True)]


CONTENDERS = (
    splus("SPlus"),
    splus("SPlus, signs", normalization_decay=0.0),
    splus("SPlus, bf16 products", matmul_dtype=torch.bfloat16),
    splus("SPlus, shorter sides, bf16 products", sides="shorter", matmul_dtype=torch.bfloat16),
    Contender("pytorch_optimizer SPlus", _published_splus, "inverse_steps", {"inverse_steps": NEVER}),
    Contender("pytorch_optimizer SOAP", _soap, "precondition_frequency", {"precondition_frequency": NEVER}),
    Contender("torch Muon + AdamW", _muon),
    Contender("torch AdamW, fused", _adamw),
)


class Floor:
    """The six products of SPlus's rule alone, batched by shape, into memory that is there already."""

    def __init__(self, parameters: ParameterSet, device: torch.device) -> None:
        self.batches = []
        for m, n in dict.fromkeys(parameters.matrices):
            count = parameters.matrices.count((m, n))
            shapes = [(count, m, n)] * 3 + [(count, m, m), (count, n, n)] * 2
            self.batches.append([torch.randn(shape, device=device) for shape in shapes])

    def step(self) -> None:
        for G, X, Y, L, R, Q_L, Q_R in self.batches:
            L.baddbmm_(G, G.mT, beta=0.97, alpha=0.03)
            R.baddbmm_(G.mT, G, beta=0.97, alpha=0.03)
            torch.bmm(Q_L.mT, G, out=X)
            torch.bmm(X, Q_R, out=Y)
            torch.bmm(Q_L, Y, out=X)
            torch.bmm(X, Q_R.mT, out=Y)


class Run:
    """One contender with parameters and an optimizer of its own; gradients, a few sets of them, are everyone's."""

    def __init__(self, contender: Contender, parameters: ParameterSet, gradients: list[list[Tensor]]) -> None:
        shapes = (*parameters.matrices, *parameters.others)
        device = gradients[0][0].device
        generator = torch.Generator(device).manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator, device=device)) for shape in shapes]
        self.contender, self.gradients, self.steps = contender, gradients, 0
        count = len(parameters.matrices)
        self.optimizers = contender.make(list(self.parameters[:count]), list(self.parameters[count:]))

    def prepare(self) -> None:
        """Set the gradients of the next step."""
        for parameter, gradient in zip(self.parameters, self.gradients[self.steps % len(self.gradients)]):
            parameter.grad = gradient
        self.steps += 1

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def settle(self) -> None:
        """Go on as after a thousand steps, past SPlus's early refreshes."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, SPlus):
                for state in optimizer.state.values():
                    state["step"] = 1000

    def set_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Set options of every group; the values they had."""
        before = {name: self.optimizers[0].param_groups[0][name] for name in options}
        for group in self.optimizers[0].param_groups:
            group.update(options)
        for state in self.optimizers[0].state.values():  # SOAP goes by a copy of its period there
            state.update({name: value for name, value in options.items() if name in state})
        return before

    def state_bytes(self) -> int:
        """Of the tensors in the state, each counted once."""
        storages = {}

        def visit(value: Any) -> None:
            if isinstance(value, Tensor):
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            elif isinstance(value, (list, tuple)):
                for item in value:
                    visit(item)

        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                visit(list(state.values()))
        return sum(storages.values())
