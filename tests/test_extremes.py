"""Gradients of any size, and what a step leaves behind when it runs out of memory."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from reference import draws, drive
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from splus import SPlus
from splus.workspace import Workspace

SINGLE = torch.float32


def weights_at(powers: Iterable[float], shape: tuple[int, int] = (48, 32), **options: Any) -> Tensor:
    """Weights (steps, m, n) in fp32 under independent gradients times these powers of two, from zero without decay."""
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = SPlus([parameter], weight_decay=0.0, precondition_frequency=5, **options)
    scales, weights = 2.0 ** torch.tensor(list(powers)), []
    for G, scale in zip(draws(len(scales), *shape, dtype=SINGLE), scales):
        drive(optimizer, [parameter], [[G * scale]])
        weights.append(parameter.detach().clone())
    return torch.stack(weights)


# Size


@pytest.mark.parametrize("method", ["qr", "eigh"])
@pytest.mark.parametrize("power", [-112, -83, -50, -41, -30, 27, 40, 50, 63, 64, 83, 112])
def test_gradients_of_any_size(power: int, method: str) -> None:
    """Also where squares leave fp32's range, gradients times a power of two give the same weights, bit for bit."""
    plain = weights_at([0.0] * 30, refresh_method=method)
    assert torch.equal(weights_at([power] * 30, refresh_method=method), plain)


@pytest.mark.parametrize("start", [-100, -60, 30, 60])
@pytest.mark.parametrize("growth", [1, -1])
def test_gradients_whose_size_changes(start: int, growth: int) -> None:
    """A size that grows or shrinks 2**40-fold in training is followed: the weights are those of any other range."""
    ramp = torch.arange(40) * growth
    assert torch.equal(weights_at(ramp + start), weights_at(ramp))


@pytest.mark.parametrize("power", [-83, 83])
def test_state_of_extreme_gradients_is_loaded(power: int) -> None:
    """A run that is resumed at an extreme size is the uninterrupted one."""
    gradients = draws(20, 1, 8, 6, dtype=SINGLE) * 2.0**power
    parameters = [nn.Parameter(torch.zeros(8, 6)) for _ in range(2)]
    first, second = (SPlus([parameter], precondition_frequency=5) for parameter in parameters)
    drive(first, parameters[:1], gradients[:12])
    second.load_state_dict(first.state_dict())
    parameters[1].data.copy_(parameters[0])
    for optimizer, parameter in zip((first, second), parameters):
        drive(optimizer, [parameter], gradients[12:])
    assert torch.equal(*parameters)


def test_a_spike_does_not_stop_training() -> None:
    """After one gradient of 2**83 the ordinary ones move the weights on by whole steps, and all stays finite."""
    weights = weights_at([0.0] * 10 + [83.0] + [0.0] * 400, (6, 6))
    steps = torch.linalg.matrix_norm(weights.diff(dim=0)[-1])
    assert bool(weights.isfinite().all())
    assert steps.item() > 0.25 * torch.linalg.matrix_norm(weights[0]).item()


def test_rows_without_a_gradient_come_to_rest() -> None:
    """An entry that had a gradient once moves until its momentum is no normal number, one that had none not at all."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = SPlus([parameter], weight_decay=0.0)
    drive(optimizer, [parameter], [[torch.tensor([1.0, 0.0, -1e-20])]] + [[torch.zeros(3)]] * 850)
    rest = parameter.detach().clone()
    drive(optimizer, [parameter], [[torch.zeros(3)]] * 50)
    assert torch.equal(parameter, rest)
    assert rest.sign().tolist() == [-1, 0, 1]


def test_gradients_that_end_and_return() -> None:
    """Long without a gradient but zero, a matrix stays where the momentum leaves it, and moves when one returns."""
    weights = weights_at([0.0] * 5 + [-torch.inf] * 1000 + [0.0] * 20, (4, 4))
    assert torch.equal(weights[900], weights[1004])
    assert bool((weights[-1] - weights[1004]).abs().min() > 0)
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize("kind", ["zero", "few rows", "rank seven", "all equal"])
def test_gradients_without_full_rank(kind: str) -> None:
    """No solver gives up on zero, mostly zero, low-rank and constant gradients, and zero ones move nothing."""
    full = draws(40, 96, 80, dtype=SINGLE)
    rows = torch.zeros(96, 1)
    rows[::16] = 1
    gradients = {
        "zero": full * 0,
        "few rows": full * rows,
        "rank seven": full[:, :, :7] @ full[:, :7] * 1e-3,
        "all equal": torch.ones_like(full),
    }[kind]
    parameter = nn.Parameter(torch.ones(96, 80))
    optimizer = SPlus([parameter], weight_decay=0.0)
    drive(optimizer, [parameter], gradients.unsqueeze(1))
    assert bool(parameter.isfinite().all())
    assert torch.equal(parameter, torch.ones(96, 80)) == (kind == "zero")
    assert optimizer.metrics()[0]["orthogonality_error"] < 1e-4


# Memory


class OutOfMemory(TorchDispatchMode):
    """Operation number ``fails_at`` inside finds no memory; ``count`` says how many there were."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.fails_at, self.count = fails_at, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.fails_at:
            raise torch.OutOfMemoryError(f"no memory for {function}")
        return function(*args, **(kwargs or {}))


SHAPES = [(4, 4), (4, 4), (6, 4), (5,), (3,), (4, 4)]
DTYPES = [*[SINGLE] * 4, torch.bfloat16, torch.bfloat16]


def halfway() -> tuple[SPlus, list[nn.Parameter]]:
    """An optimizer of two groups before its third step, with no scratch memory; the gradients are there."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, DTYPES)]
    options: dict[str, Any] = {"precondition_frequency": 1, "weight_decay": 1.0}
    optimizer = SPlus([{"params": parameters[:4]}, {"params": parameters[4:]}], **options)
    gradients = [draws(2, *shape, seed=i, dtype=dtype) for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES))]
    drive(optimizer, parameters, zip(*gradients))
    optimizer._workspace = Workspace()
    return optimizer, parameters


def copied(original: tuple[SPlus, list[nn.Parameter]]) -> tuple[SPlus, list[nn.Parameter]]:
    """A copy with the gradients that copies of parameters leave out."""
    optimizer, parameters = copy.deepcopy(original)
    for parameter, of in zip(parameters, original[1]):
        parameter.grad = of.grad
    return optimizer, parameters


def holdings(optimizer: SPlus, parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    """For each parameter, itself and its state but for the bases and what is forgotten with them."""
    return [
        [parameter.detach().clone()]
        + [
            torch.as_tensor(v).clone()
            for k, v in optimizer.state[parameter].items()
            if not k.startswith(("basis", "recent_norm"))
        ]
        for parameter in parameters
    ]


def recent_norms(optimizer: SPlus, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [optimizer.state[parameter]["recent_norm"].clone() for parameter in parameters]


def test_out_of_memory_in_a_step() -> None:
    """Wherever memory runs out, parameters have stepped wholly or not at all, but for those of one batch."""
    original = halfway()
    optimizer, parameters = copied(original)
    with OutOfMemory() as whole:
        optimizer.step()
    after = holdings(optimizer, parameters)
    unrefreshed, same = copied(original)
    for group in unrefreshed.param_groups:
        group |= {"precondition_frequency": 10**6, "refresh_growth": None, "spread_refreshes": False}
    unrefreshed.step()
    # Without memory before and after; within the step that of the momentum, until the refresh.
    memories = [(of, torch.zeros_like(of)) for of in recent_norms(unrefreshed, same)]
    assert all(bool((of != 0).any()) for of, _ in memories)
    outcomes = []
    places = [*range(5), *range(5, whole.count, 4)]
    for fails_at in places:
        optimizer, parameters = copied(original)
        before = holdings(optimizer, parameters)
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(fails_at):
            optimizer.step()
        now = holdings(optimizer, parameters)
        stepped, kept = [[all(map(torch.equal, *pair)) for pair in zip(now, then)] for then in (after, before)]
        outcomes.append((sum(stepped), sum(kept)))
        known = [
            any(torch.equal(now, of) for of in (*then, was))
            for now, then, was in zip(recent_norms(optimizer, parameters), memories, recent_norms(*original))
        ]
        assert sum(known) >= len(parameters) - 2
        if fails_at % 10 == 0:
            optimizer.step()
            optimizer.eval()
            assert all(bool(parameter.isfinite().all()) for parameter in parameters)
    count = len(parameters)
    assert all(stepped + kept >= count - 2 for stepped, kept in outcomes), outcomes
    # All is prepared first, and bases are refreshed last.
    assert set(outcomes[:5]) == {(0, count)}
    refreshing = outcomes.index((count, 0))
    assert set(outcomes[refreshing:]) == {(count, 0)}
    assert len(outcomes) - refreshing > 10
