"""Whether a long run leaves anything behind: memory, the state's health and the weights, over thousands of steps.

    python -m benchmarks.soak [--steps 20000] [--every 2000] [--dtype float32]

A small network learns another one from random inputs at a constant rate. The averaged weights are swapped in every 10
steps; every 100 steps the run is saved and goes on in a new model and optimizer. A minute or two on two cores; nothing
is written.
"""

from __future__ import annotations

import argparse
import gc
import io
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from splus import SPlus
from splus.eigenbasis import orthogonality_error

SWAP_EVERY, RELOAD_EVERY = 10, 100
RATE = 0.05


@dataclass(frozen=True)
class Health:
    """A run at one step. ``rss_mib`` is the process's; the rest is exact.

    Attributes:
        tensors, live_bytes: of all tensors in the process, each storage counted once.
        state_bytes: of the optimizer's state.
        finite: all weights and state.
        asymmetry: the largest |S - Sᵀ| / max |S| of a factor S.
        smallest: the smallest eigenvalue of a factor over its largest.
        orthogonality: the largest |QᵀQ - I| of a basis.
        distance, drift: from the weights to their averages, and to where they began, over the latter's norm.
    """

    step: int
    loss: float
    rss_mib: float
    tensors: int
    live_bytes: int
    state_bytes: int
    finite: bool
    asymmetry: float
    smallest: float
    orthogonality: float
    distance: float
    drift: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=2000, help="steps between two lines; reloads are every 100")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    options = parser.parse_args()
    table = Table(*(field.name.replace("_", " ") for field in fields(Health)), box=box.SIMPLE_HEAD)
    for health in soak(options.steps, options.every, getattr(torch, options.dtype)):
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in astuple(health)))
    Console(width=150).print(table)


def soak(steps: int, every: int, dtype: torch.dtype = torch.float32) -> Iterator[Health]:
    """Train for ``steps`` with swaps and reloads in between, and look at the run after each ``every`` of them."""
    generator = torch.Generator().manual_seed(0)
    teacher, model = network(dtype, generator), network(dtype, generator)
    optimizer = optimizer_of(model)
    start = [parameter.detach().to(torch.float32, copy=True) for parameter in model.parameters()]
    for step in range(1, steps + 1):
        x = torch.randn(32, 2, 4, 4, generator=generator).to(dtype)
        loss = (model(x) - teacher(x).detach()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SWAP_EVERY == 0:
            with optimizer.averaged(), torch.no_grad():
                model(x)
        if step % RELOAD_EVERY == 0:
            model, optimizer = reloaded(model, optimizer, dtype)
        if step % every == 0:
            yield health(step, loss.item(), model, optimizer, start)


def network(dtype: torch.dtype, generator: torch.Generator) -> nn.Sequential:
    """A convolution, square and oblong matrices, norms and biases."""
    model = nn.Sequential(
        *(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(128, 24), nn.LayerNorm(24), nn.GELU()),
        *(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5)),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    return model.to(dtype)


def optimizer_of(model: nn.Module) -> SPlus:
    return SPlus(model.parameters(), lr=RATE, ema_decay=0.99)


def reloaded(model: nn.Module, optimizer: SPlus, dtype: torch.dtype) -> tuple[nn.Sequential, SPlus]:
    """The run through a file, in a new model and a new optimizer."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    fresh = network(dtype, torch.Generator().manual_seed(1))
    fresh.load_state_dict(weights)
    restored = optimizer_of(fresh)
    restored.load_state_dict(state)
    return fresh, restored


@torch.no_grad()
def health(step: int, loss: float, model: nn.Module, optimizer: SPlus, start: list[Tensor]) -> Health:
    """What there is to see at a step; ``start`` are the weights at the beginning."""
    states = list(optimizer.state.values())
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    factors = [v.double() for state in states for k, v in state.items() if k.startswith("factor")]
    bases = [v.double() for state in states for k, v in state.items() if k.startswith("basis")]
    spectra = [torch.linalg.eigvalsh((S + S.mT) / 2) for S in factors]
    weights = [p.float() for p in model.parameters()]
    averages = [state["average"].float() for state in states]
    initial = norm(start)
    state_bytes = sum({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in tensors}.values())
    finite = all(bool(value.isfinite().all()) for value in [*weights, *tensors])
    asymmetry = max(float((S - S.mT).abs().max() / S.abs().max()) for S in factors)
    smallest = min(float(of.min() / of.max()) for of in spectra)
    orthogonality = max(float(orthogonality_error(Q).max()) for Q in bases)
    distance = norm([a - w for a, w in zip(averages, weights)]) / initial
    drift = norm([w - s for w, s in zip(weights, start)]) / initial
    del tensors, factors, bases, spectra, weights, averages
    live = live_tensors()
    return Health(
        step, loss, resident_mib(), *live, state_bytes, finite, asymmetry, smallest, orthogonality, distance, drift
    )


def norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def live_tensors() -> tuple[int, int]:
    """The number of tensors that Python holds, and the bytes of their storages."""
    gc.collect()
    with warnings.catch_warnings():  # some modules warn when their attributes are looked at
        warnings.simplefilter("ignore")
        tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


def resident_mib() -> float:
    """Of this process, from /proc; NaN where there is none."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))
    except FileNotFoundError:
        return float("nan")


if __name__ == "__main__":
    main()
