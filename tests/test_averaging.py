"""The averaged weights: what they are, and that swapping them in and out leaves no trace."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import draws, drive
from torch import Tensor, nn

from splus import SPlus
from splus.averaging import averaging_weight, update_averages

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(4, 4), (6, 3), (5,), ()]


def network(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[SPlus, list[nn.Parameter]]:
    """An optimizer of matrices, a vector and a scalar."""
    parameters = [nn.Parameter(draws(1, *shape, seed=i, dtype=dtype)[0]) for i, shape in enumerate(SHAPES)]
    return SPlus(parameters, **{"ema_decay": 0.9, "weight_decay": 0.5, **options}), parameters


def gradients(steps: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(draws(steps, *shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(SHAPES)))


def bits(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# What they are


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
def test_averages_are_bias_corrected(decay: float) -> None:
    """At every step the average is A / (1 - ρᵗ), with A ← ρ A + (1-ρ) W from zero over the weights before decay."""
    optimizer, parameters = network(torch.float64, ema_decay=decay, weight_decay=0.0)
    A = [torch.zeros_like(parameter) for parameter in parameters]
    for t, of_step in enumerate(gradients(40, torch.float64), start=1):
        drive(optimizer, parameters, [of_step])
        A = [decay * average + (1 - decay) * parameter.detach() for average, parameter in zip(A, parameters)]
        with optimizer.averaged():
            expected = [average / (1 - decay**t) for average in A]
            torch.testing.assert_close(bits(parameters), expected, rtol=1e-12, atol=1e-13)


def test_weights_are_averaged_before_they_decay() -> None:
    """After step 1 the average is what the weights were before decay."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = SPlus([parameter], lr=0.1, weight_decay=100.0, elementwise_scale=1e-3)
    drive(optimizer, [parameter], [[torch.zeros(3, dtype=torch.float64)]])
    assert torch.equal(optimizer.state[parameter]["average"], torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - 0.1 * 1e-3 * 100.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999, 0.999999])
def test_first_average_is_the_weights(decay: float, dtype: torch.dtype) -> None:
    """After one step, and whatever ρ, the averages are the weights exactly."""
    optimizer, parameters = network(dtype, ema_decay=decay, weight_decay=0.0)
    drive(optimizer, parameters, gradients(1, dtype))
    weights = bits(parameters)
    optimizer.eval()
    assert same(bits(parameters), weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_before_any_step_the_averages_are_the_weights(dtype: torch.dtype) -> None:
    """eval() of a new optimizer changes nothing."""
    optimizer, parameters = network(dtype)
    weights = bits(parameters)
    optimizer.eval()
    assert same(bits(parameters), weights)
    optimizer.train()
    assert same(bits(parameters), weights)


def test_weight_of_the_newest_weights() -> None:
    """(1 - ρ) / (1 - ρᵗ): 1 at step 1, 1/t in the limit ρ → 1, 1 - ρ in the end; no cancellation near ρ = 1."""
    assert averaging_weight(0.0, 7) == 1.0
    assert all(averaging_weight(decay, 1) == pytest.approx(1, abs=1e-15) for decay in (0.5, 0.999, 1 - 1e-12))
    assert averaging_weight(1 - 1e-12, 10) == pytest.approx(0.1, rel=1e-10)
    assert averaging_weight(0.9, 2) == pytest.approx(0.1 / 0.19, rel=1e-14)
    assert averaging_weight(0.9, 10**6) == pytest.approx(0.1, rel=1e-14)


def test_parameters_of_different_ages_average_by_their_own() -> None:
    """Each average moves by the weight of its own number of steps."""
    averages, weights = [torch.zeros(2) for _ in range(4)], [torch.ones(2) * i for i in range(4)]
    update_averages(averages, weights, 0.9, [1, 3, 1, 2])
    expected = [0.0, averaging_weight(0.9, 3), 2.0, 3 * averaging_weight(0.9, 2)]
    torch.testing.assert_close(averages, [torch.full((2,), value) for value in expected])


def test_only_parameters_with_a_gradient_are_averaged() -> None:
    """A parameter without a gradient keeps its average and its age; its average is of the steps it took."""
    optimizer, parameters = network(weight_decay=0.0)
    some = [[G if i % 2 == 0 else None for i, G in enumerate(of_step)] for of_step in gradients(5)]
    drive(optimizer, parameters, gradients(1, seed=9))
    before = [optimizer.state[parameter]["average"].clone() for parameter in parameters]
    drive(optimizer, parameters, some)
    for i, parameter in enumerate(parameters):
        state = optimizer.state[parameter]
        assert state["step"] == (6 if i % 2 == 0 else 1)
        assert torch.equal(state["average"], before[i]) == (i % 2 == 1)
        assert torch.equal(state["average"], parameter.detach()) == (i % 2 == 1)


# Swapping them


@pytest.mark.parametrize("dtype", DTYPES)
def test_swap_is_exact_and_idempotent(dtype: torch.dtype) -> None:
    """eval() puts the averages in, train() the weights back bit for bit; a second call of either changes nothing."""
    optimizer, parameters = network(dtype, lr=1.0)
    drive(optimizer, parameters, gradients(20, dtype))
    weights = bits(parameters)
    averages = [optimizer.state[parameter]["average"].to(dtype) for parameter in parameters]
    assert not same(weights, averages)
    assert optimizer.training
    for _ in range(2):
        for _ in range(2):
            assert optimizer.eval() is optimizer
            assert not optimizer.training
            assert same(bits(parameters), averages)
        for _ in range(2):
            assert optimizer.train() is optimizer
            assert optimizer.training
            assert same(bits(parameters), weights)
    optimizer.train(False)
    assert same(bits(parameters), averages)


@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluating_often_leaves_no_trace(dtype: torch.dtype) -> None:
    """A run that evaluates after every step, twice, equals one that never does, bit for bit."""
    runs = []
    for evaluates in (True, False):
        optimizer, parameters = network(dtype)
        for of_step in gradients(30, dtype):
            drive(optimizer, parameters, [of_step])
            if evaluates:
                with optimizer.averaged():
                    pass
                optimizer.eval().train()
        state = [torch.as_tensor(value) for p in parameters for _, value in sorted(optimizer.state[p].items())]
        runs.append(bits(parameters) + state)
    assert same(*runs)


def test_training_state_has_no_copy_of_the_weights() -> None:
    """The copy that eval() keeps of full-precision weights goes with train()."""
    optimizer, parameters = network()
    drive(optimizer, parameters, gradients(2))
    keys = [set(optimizer.state[parameter]) for parameter in parameters]
    optimizer.eval()
    assert all("weights" in optimizer.state[parameter] for parameter in parameters)
    optimizer.train()
    assert [set(optimizer.state[parameter]) for parameter in parameters] == keys


def test_averages_are_not_aliased_by_the_model() -> None:
    """What is done to the model in eval mode reaches neither the averages nor the weights."""
    optimizer, parameters = network()
    drive(optimizer, parameters, gradients(5))
    weights = bits(parameters)
    averages = [optimizer.state[parameter]["average"].clone() for parameter in parameters]
    optimizer.eval()
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    optimizer.train()
    assert same(bits(parameters), weights)
    assert same([optimizer.state[parameter]["average"] for parameter in parameters], averages)


def test_context_manager_swaps_and_restores() -> None:
    """averaged() has the averages in the model inside and the weights outside."""
    optimizer, parameters = network()
    drive(optimizer, parameters, gradients(5))
    weights = bits(parameters)
    with optimizer.averaged() as inside:
        assert inside is optimizer
        assert same(bits(parameters), [optimizer.state[parameter]["average"] for parameter in parameters])
    assert same(bits(parameters), weights)


def test_context_manager_restores_on_exceptions() -> None:
    """Whatever is raised inside goes through, and the weights are back."""
    optimizer, parameters = network()
    drive(optimizer, parameters, gradients(5))
    weights = bits(parameters)
    with pytest.raises(KeyboardInterrupt), optimizer.averaged():
        raise KeyboardInterrupt
    assert optimizer.training
    assert same(bits(parameters), weights)


def test_context_manager_nests() -> None:
    """Leaving an inner averaged(), or one entered in eval mode, leaves the averages in place."""
    optimizer, parameters = network()
    drive(optimizer, parameters, gradients(5))
    weights = bits(parameters)
    with optimizer.averaged():
        averages = bits(parameters)
        with pytest.raises(ValueError, match="inner"), optimizer.averaged():
            raise ValueError("inner")
        assert not optimizer.training
        assert same(bits(parameters), averages)
    assert same(bits(parameters), weights)
    optimizer.eval()
    with optimizer.averaged():
        pass
    assert not optimizer.training
    assert same(bits(parameters), averages)


def test_training_inside_the_context_manager() -> None:
    """train() inside averaged() is allowed; outside, the mode is the one of before."""
    optimizer, parameters = network()
    drive(optimizer, parameters, gradients(5))
    with optimizer.averaged():
        optimizer.train()
        drive(optimizer, parameters, gradients(1))
        weights = bits(parameters)
    assert optimizer.training
    assert same(bits(parameters), weights)


def test_step_in_eval_mode_is_an_error() -> None:
    """step() on averaged weights raises, says what to do, runs no closure and changes nothing."""
    optimizer, parameters = network()
    drive(optimizer, parameters, gradients(3))
    optimizer.eval()
    before = bits(parameters)

    def closure() -> float:
        raise AssertionError("the closure ran")

    with pytest.raises(RuntimeError, match=r"optimizer\.train\(\)"):
        optimizer.step(closure)
    assert same(bits(parameters), before)
    assert [optimizer.state[parameter]["step"] for parameter in parameters] == [3] * len(parameters)


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_added_in_eval_mode(dtype: torch.dtype) -> None:
    """A group that joins while the averages are in the model is in the same mode, and trains on as if added later."""
    runs = []
    for adds_in_eval in (True, False):
        optimizer, parameters = network(dtype)
        late = nn.Parameter(draws(1, 4, 4, seed=7, dtype=dtype)[0])
        start = late.detach().clone()
        drive(optimizer, parameters, gradients(5, dtype))
        if adds_in_eval:
            optimizer.eval()
            optimizer.add_param_group({"params": [late]})
            assert torch.equal(late, start)
            assert {group["training"] for group in optimizer.param_groups} == {False}
            optimizer.train()
            assert torch.equal(late, start)
        else:
            optimizer.add_param_group({"params": [late]})
        everything = [*parameters, late]
        drive(optimizer, everything, [(*of_step, of_step[0]) for of_step in gradients(5, dtype, seed=1)])
        runs.append(bits(everything))
        optimizer.eval()
        runs[-1] += bits(everything)
    assert same(*runs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swap_keeps_strides_and_storage(dtype: torch.dtype) -> None:
    """The swap writes into the parameters: their memory, strides and gradients stay what they were."""
    parameter = nn.Parameter(draws(1, 4, 3, 2, 2, dtype=dtype)[0].contiguous(memory_format=torch.channels_last))
    optimizer = SPlus([parameter])
    drive(optimizer, [parameter], draws(3, 1, 4, 3, 2, 2, dtype=dtype))
    weights, gradient = parameter.detach().clone(), parameter.grad
    before = parameter.data_ptr(), parameter.stride()
    for mode in (False, True):
        optimizer.train(mode)
        assert (parameter.data_ptr(), parameter.stride()) == before
        assert parameter.grad is gradient
        assert parameter.requires_grad
    assert torch.equal(parameter, weights)


def test_swap_drops_the_autocast_cache() -> None:
    """Within one autocast block the model sees the averages after eval() and the weights after train()."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = SPlus(model.parameters(), lr=1.0, ema_decay=0.9)
    drive(optimizer, [model.weight], draws(10, 1, 8, 8, dtype=torch.float32))
    x = draws(1, 3, 8, dtype=torch.float32)[0]

    def low_precision_product() -> Tensor:
        return x.bfloat16() @ model.weight.detach().bfloat16().T

    with torch.autocast("cpu", dtype=torch.bfloat16):
        of_weights = model(x)
        with optimizer.averaged():
            of_averages, expected = model(x), low_precision_product()
        back = model(x)
    assert of_weights.dtype == torch.bfloat16
    assert torch.equal(of_averages, expected)
    assert not torch.equal(of_averages, of_weights)
    assert torch.equal(back, of_weights)
