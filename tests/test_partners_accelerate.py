"""Accelerate: what it prepares trains as a plain loop does, switches in both modes, and is saved in either."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from partners import bits, loss_of, network, optimizer_of, same
from torch import Tensor, nn

from splus import SPlus

INPUTS = torch.randn(12, 4, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerate's settings are the process's; each test starts without any."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def prepared(**options: Any) -> tuple[Accelerator, nn.Module, Any, SPlus]:
    accelerator = Accelerator(cpu=True, **options)
    model = network()
    own = optimizer_of(model)
    model, wrapped = accelerator.prepare(model, own)
    return accelerator, model, wrapped, own


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, batches: Tensor) -> list[float]:
    losses = []
    for x in batches:
        with accelerator.accumulate(model):
            loss = loss_of(model, x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_loop(accumulate: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = network()
    optimizer = optimizer_of(model)
    for number, x in enumerate(INPUTS, start=1):
        (loss_of(model, x) / accumulate).backward()
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    weights = bits(model)
    optimizer.eval()
    return weights, bits(model)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_prepared_loop_is_the_plain_loop(accumulate: int) -> None:
    """With clipping and accumulated gradients, bit for bit."""
    accelerator, model, optimizer, _ = prepared(gradient_accumulation_steps=accumulate)
    train(accelerator, model, optimizer, INPUTS)
    assert same(bits(model), plain_loop(accumulate)[0])


@pytest.mark.parametrize("prepared_in", ["train", "eval"])
def test_switch_reaches_through_the_wrapper(prepared_in: str) -> None:
    """train() and eval() of what prepare returned change the weights, also when it was prepared in eval mode."""
    weights, averages = plain_loop()
    accelerator = Accelerator(cpu=True)
    model = network()
    own = optimizer_of(model)
    getattr(own, prepared_in)()
    model, wrapped = accelerator.prepare(model, own)
    assert own.training == (prepared_in == "train")
    wrapped.train()
    train(accelerator, model, wrapped, INPUTS)
    for _ in range(2):
        wrapped.eval()
        assert same(bits(model), averages)
        wrapped.train()
        assert same(bits(model), weights)


def test_the_optimizer_that_was_prepared_stays_the_one_in_use() -> None:
    """averaged() and training are those of one's own reference, and of the wrapper's .optimizer."""
    _, averages = plain_loop()
    accelerator, model, wrapped, own = prepared()
    train(accelerator, model, wrapped, INPUTS)
    assert wrapped.optimizer is own
    with own.averaged():
        assert same(bits(model), averages)
        assert not wrapped.param_groups[0]["training"]


@pytest.mark.parametrize("live", ["train", "eval"])
@pytest.mark.parametrize("saved", ["train", "eval"])
def test_saved_state_continues_exactly(saved: str, live: str, tmp_path: Path) -> None:
    """save_state in either mode, loaded into either: the mode and the run are those of the uninterrupted one."""
    weights, _ = plain_loop()
    accelerator, model, optimizer, _ = prepared()
    train(accelerator, model, optimizer, INPUTS[:5])
    getattr(optimizer, saved)()
    accelerator.save_state(str(tmp_path))
    optimizer.train()
    train(accelerator, model, optimizer, INPUTS[5:8])
    getattr(optimizer, live)()
    accelerator.load_state(str(tmp_path))
    assert optimizer.param_groups[0]["training"] == (saved == "train")
    optimizer.train()
    train(accelerator, model, optimizer, INPUTS[5:])
    assert same(bits(model), weights)


def test_low_precision_forward_passes() -> None:
    """mixed_precision="bf16" trains, and a forward pass after a switch uses the weights that are in the model."""
    accelerator, model, optimizer, _ = prepared(mixed_precision="bf16")
    losses = train(accelerator, model, optimizer, INPUTS.repeat(3, 1, 1))
    assert sum(losses[-6:]) < sum(losses[:6])
    with accelerator.autocast(), torch.no_grad():
        model(INPUTS[0])
        optimizer.eval()
        averaged = model(INPUTS[0])
    fresh = network()
    fresh.load_state_dict(accelerator.unwrap_model(model).state_dict())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(averaged.float(), fresh(INPUTS[0]).float())
