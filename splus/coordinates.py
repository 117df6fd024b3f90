"""Do a model's activations move as much at every width? The check of a parametrisation and its learning rates."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class CoordinateCheck:
    """What :func:`coordinate_check` measured, as root mean squares by module, [width][step].

    Attributes:
        widths: as given.
        activations: of each module's output after steps 1, 2, …
        changes: of what these outputs differ by from those before step 1.
        hidden: the modules with a weight both of whose sides follow the width.
    """

    widths: tuple[int, ...]
    activations: dict[str, list[list[float]]]
    changes: dict[str, list[list[float]]]
    hidden: frozenset[str]

    def slopes(self) -> dict[str, tuple[float, float]]:
        """By module, the slopes of log activation and of log change on log width, both as RMS over all steps.

        0 is what carries over; NaN where a module's output is always zero, or not finite.
        """
        return {name: (self._slope(self.activations[name]), self._slope(self.changes[name])) for name in self.changes}

    def failures(self, tolerance: float = 0.1) -> dict[str, tuple[float, float]]:
        """The hidden modules with a slope outside of ±tolerance."""
        return {
            name: slopes
            for name, slopes in self.slopes().items()
            if name in self.hidden and not all(abs(slope) <= tolerance for slope in slopes)
        }

    def _slope(self, rms: list[list[float]]) -> float:
        """Least squares. A step that moves little or nothing, as behind a layer that starts at zero, counts little."""
        squares = [sum(value**2 for value in of_width) / len(of_width) for of_width in rms]
        if any(not 0 < square < math.inf for square in squares):
            return math.nan
        y = [math.log2(square) / 2 for square in squares]
        x = [math.log2(width) for width in self.widths]
        x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
        return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y)) / sum((a - x_mean) ** 2 for a in x)

    def __str__(self) -> str:
        """A table: a line a module, hidden ones marked."""
        names = [f"{name} *" if name in self.hidden else name for name in self.changes]
        length = max(map(len, names), default=0)
        lines = [f"{'':{length}}  activation  change   (slopes of log on log width; * hidden)"]
        for name, (activation, change) in zip(names, self.slopes().values()):
            lines.append(f"{name:{length}}  {activation:+10.2f}  {change:+6.2f}")
        return "\n".join(lines)


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    batch: Any,
    widths: Sequence[int],
    make_optimizer: Callable[[nn.Module], Optimizer],
    *,
    loss: Loss | None = None,
    steps: int = 5,
    seeds: int = 3,
) -> CoordinateCheck:
    """Train models of several widths a few steps on one batch and see how far every module's output moves.

    Where a learning rate carries over from one width to another, outputs of hidden layers and their changes do not
    depend on the width (Tensor Programs V, arXiv 2203.03466, section 5 and appendix D.1)::

        check = splus.coordinate_check(make_gpt, (tokens, targets), (64, 128, 256, 512),
                                       lambda model: SPlus(param_groups(model), lr=0.7))
        print(check)
        assert not check.failures()

    Args:
        make_model: a new model of the given width; torch's generator is seeded before each call.
        batch: what ``loss`` takes; the same at every step.
        widths: two or more.
        make_optimizer: an optimizer for a model.
        loss: of a model on the batch, a tensor of one element; by default ``model(*batch)`` of a tuple or list,
            ``model(**batch)`` of a mapping, ``model(batch)`` of anything else, or the ``loss`` of what that returns.
        steps: how many.
        seeds: repetitions, over which squares are averaged.

    Raises:
        ValueError: fewer than two widths, or models whose modules do not have the same names.
    """
    widths = tuple(widths)
    if len(set(widths)) < 2:
        raise ValueError(f"widths={widths} are given; a slope needs two different ones, better four or more.")
    activations: dict[str, list[list[float]]] = {}
    changes: dict[str, list[list[float]]] = {}
    weights: list[dict[str, torch.Size]] = []
    for width in widths:
        runs = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = make_model(width)
            runs.append(_run(model, batch, make_optimizer(model), loss or _default_loss, steps))
        weights.append({name: weight.shape for name, weight in _weights(model)})
        for kind, into in ((0, activations), (1, changes)):
            for name in runs[0][kind]:
                squares = zip(*(run[kind][name] for run in runs))
                into.setdefault(name, []).append([math.sqrt(sum(step) / seeds) for step in squares])
    uneven = [name for name, rms in changes.items() if len(rms) != len(widths)]
    if uneven:
        raise ValueError(f"The models do not all have the modules {', '.join(uneven)}; widths alone may differ.")
    return CoordinateCheck(widths, activations, changes, frozenset(_hidden(weights)))


def _run(
    model: nn.Module, batch: Any, optimizer: Optimizer, loss: Loss, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By module, the mean squares of its outputs after each step and of their changes since before the first."""
    before: dict[str, list[Tensor]] = {}
    activations: dict[str, list[float]] = {}
    changes: dict[str, list[float]] = {}
    for step in range(steps + 1):
        with _recorded_outputs(model) as outputs:
            value = loss(model, batch)
        if step == 0:
            before = outputs
        else:
            for name, after in outputs.items():
                moved = [now - then for now, then in zip(after, before[name])]
                activations.setdefault(name, []).append(_mean_square(after))
                changes.setdefault(name, []).append(_mean_square(moved))
        if step < steps:
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    return activations, changes


@contextmanager
def _recorded_outputs(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The outputs of every call of every module inside, by the module's name ("" is the model)."""
    outputs: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                outputs.setdefault(name, []).append(first.detach().double())

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in model.named_modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _mean_square(tensors: list[Tensor]) -> float:
    return float(sum(tensor.square().sum() for tensor in tensors) / sum(tensor.numel() for tensor in tensors))


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of two or more dimensions, by their modules' names."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= 2:
            yield name, weight


def _hidden(weights: list[dict[str, torch.Size]]) -> Iterator[str]:
    """The names of the weights whose first two sides both differ between the first and the last width."""
    for name, first in weights[0].items():
        last = weights[-1][name]
        if first[0] != last[0] and first[1] != last[1]:
            yield name


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    value = getattr(output, "loss", output)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(
            f"The model returns {type(output).__name__}, which is no loss and has none; give loss=, a function of the "
            "model and the batch."
        )
    return value
