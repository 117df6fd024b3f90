"""Schedulers in company: with a learning rate that is a tensor, with files, and with a step that is replaced."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from reference import drive
from test_interface import SCHEDULERS, gradients_of, parameters_of, same
from test_state_dict import filed
from torch import Tensor
from torch.optim import lr_scheduler as schedulers

from splus import SPlus


def advance(name: str, scheduler: Any) -> None:
    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduled_tensor_learning_rate(name: str, shape: tuple[int, ...]) -> None:
    """A tensor of one element goes through what Adam's goes through, as the same tensor if Adam's is, and is used."""
    runs: list[Any] = []
    for make in (SPlus, torch.optim.Adam):
        parameters, lr = parameters_of((4, 3), (5,)), torch.full(shape, 0.1)
        optimizer = make(parameters, lr=lr)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for of_step in gradients_of(8, (4, 3), (5,)):
            rate = optimizer.param_groups[0]["lr"]
            rates.append(float(rate))
            drive(optimizer, parameters, [of_step])
            advance(name, scheduler)
        kept = optimizer.param_groups[0]["lr"]
        runs.append((rates, type(kept), tuple(getattr(kept, "shape", ())), kept is lr))
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) > 1


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_run_resumed_with_its_scheduler(name: str, mode: bool) -> None:
    """Both state dicts loaded, in either order, saved in either mode: the same rates, betas and weights."""

    def run(parameters: list[Any], optimizer: SPlus, scheduler: Any, steps: slice) -> list[Any]:
        seen = []
        for of_step in gradients_of(12)[steps]:
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
            drive(optimizer, parameters, [of_step])
            advance(name, scheduler)
        return seen

    parameters = parameters_of()
    optimizer = SPlus(parameters, lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    run(parameters, optimizer, scheduler, slice(5))
    optimizer.train(mode)
    saved = filed(optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())
    weights = [parameter.detach().clone() for parameter in parameters]
    expected = run(parameters, optimizer.train(), scheduler, slice(5, None))
    for optimizer_first in (True, False):
        resumed = parameters_of()
        restored = SPlus(resumed, lr=0.1)
        again = SCHEDULERS[name](restored)
        if optimizer_first:
            restored.load_state_dict(saved[0])
        again.load_state_dict(copy.deepcopy(saved[1]))
        if not optimizer_first:
            restored.load_state_dict(saved[0])
        for parameter, value in zip(resumed, weights):
            parameter.data.copy_(value)
        assert run(resumed, restored.train(), again, slice(5, None)) == expected
        assert same([p.detach() for p in resumed], [p.detach() for p in parameters])


def test_rates_of_numpy_are_plain_in_a_file() -> None:
    """A scheduler that multiplies by a number of numpy leaves a state dict that the safe loader admits."""
    optimizer = SPlus(parameters_of((3,)), lr=0.5)
    scheduler = schedulers.LambdaLR(optimizer, lambda step: np.float64(0.5) ** step)
    optimizer.step()
    scheduler.step()
    assert filed(optimizer.state_dict())["param_groups"][0]["lr"] == 0.25
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize("name", ["LambdaLR", "CyclicLR", "OneCycleLR"])
@pytest.mark.parametrize("compiled", ["before", "after"])
def test_step_replaced_by_a_compiled_one(compiled: str, name: str) -> None:
    """After the scheduler was made: no warning, the same weights. Before: what Adam does, its error or the same."""

    def run(make: Any, when: str) -> list[Tensor] | type[Exception]:
        parameters = parameters_of((4, 3), (5,))
        optimizer = make(parameters, lr=0.1)
        try:
            if when == "before":
                optimizer.step = torch.compile(optimizer.step, backend="eager")
            scheduler = SCHEDULERS[name](optimizer)
        except Exception as error:
            return type(error)
        if when == "after":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        for of_step in gradients_of(4, (4, 3), (5,)):
            drive(optimizer, parameters, [of_step])
            advance(name, scheduler)
        return [parameter.detach() for parameter in parameters]

    plain = run(SPlus, "never")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = run(SPlus, compiled)
    if isinstance(ours, type):
        assert compiled == "before"
        assert ours is run(torch.optim.Adam, compiled)
    else:
        assert isinstance(plain, list)
        assert same(ours, plain)
