"""What torch asks of its own optimizers: its database of arguments and errors, and the properties its suite checks."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import draws, drive
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    optim_db,
    optim_error_inputs_func_adam,
    optim_inputs_func_adam,
)

from splus import SPlus

# Importing torch's test utilities forbids setting global flags for the rest of the process; other tests here set them.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

ADAM = next(info for info in optim_db if info.optim_cls is torch.optim.Adam)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# Adam's conditions on its own implementations, which do not apply: SPlus reads rates and decays that are tensors as
# numbers, whatever `foreach` says.
INAPPLICABLE = {
    "lr as Tensor doesn't work with foreach & not capturable",
    "betas must be either both floats or both Tensors",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
}
ERRORS = optim_error_inputs_func_adam("cpu", torch.float32)
INPUTS = [given for given in optim_inputs_func_adam("cpu", torch.float32) if not given.kwargs.get("amsgrad")]
GLOBAL_FLAGS = [{}, {"foreach": True}, {"foreach": False}, {"fused": False, "differentiable": False}]


def described(given: ErrorOptimizerInput | OptimizerInput) -> str:
    return (given.optimizer_error_input if isinstance(given, ErrorOptimizerInput) else given).desc


def linear_problem(
    make: Callable[[list[nn.Parameter]], SPlus], dtype: torch.dtype = torch.float32, contiguous: bool = True
) -> tuple[SPlus, list[nn.Parameter], Callable[[], Tensor]]:
    """The problem of torch's suite: ‖W x + b‖² with W (10, 5)."""
    weight, bias = draws(1, 10, 5, 2, seed=1, dtype=dtype)[0], draws(1, 10, 2, seed=2, dtype=dtype)[0]
    parameters = [nn.Parameter(value[..., 0].contiguous() if contiguous else value[..., 0]) for value in (weight, bias)]
    x = draws(1, 5, seed=3, dtype=dtype)[0]
    optimizer = make(parameters)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameters[0].mv(x) + parameters[1]).pow(2).sum()
        loss.backward()
        return loss

    return optimizer, parameters, closure


def trained(make: Callable[[list[nn.Parameter]], SPlus] = SPlus, steps: int = 5) -> tuple[SPlus, list[nn.Parameter]]:
    optimizer, parameters, closure = linear_problem(make)
    for _ in range(steps):
        optimizer.step(closure)
    return optimizer, parameters


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two state dicts are equal bit for bit."""
    assert a["param_groups"] == b["param_groups"]
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)


# Arguments and errors


@pytest.mark.parametrize("error", [e for e in ERRORS if described(e) not in INAPPLICABLE], ids=described)
@pytest.mark.filterwarnings("error:.*duplicate parameters:UserWarning")
def test_errors_of_adam(error: ErrorOptimizerInput) -> None:
    """What is an error for Adam is one of the same type; where torch itself raises it, with the same words."""
    given = error.optimizer_error_input
    parameters = [nn.Parameter(torch.randn(2, 3))] if given.params is None else given.params
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    with pytest.raises(error.error_type, match=None if given.params is None else error.error_regex):
        SPlus(parameters, **given.kwargs)


def test_errors_that_do_not_apply() -> None:
    """They are still Adam's, and what they forbid works here."""
    assert {described(error) for error in ERRORS} >= INAPPLICABLE
    for error in ERRORS:
        if described(error) in INAPPLICABLE:
            optimizer, _, closure = linear_problem(lambda ps, e=error: SPlus(ps, **e.optimizer_error_input.kwargs))
            optimizer.step(closure)
            assert [type(beta) for beta in optimizer.param_groups[0]["betas"]] == [float, float]


@pytest.mark.parametrize("flags", GLOBAL_FLAGS, ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("given", INPUTS, ids=described)
def test_goes_in_the_right_direction(given: OptimizerInput, contiguous: bool, flags: dict[str, Any]) -> None:
    """Adam's keyword arguments construct and train; the loss falls, or with maximize rises."""
    optimizer, _, closure = linear_problem(lambda ps: SPlus(ps, **given.kwargs, **flags), contiguous=contiguous)
    before = closure().item()
    for _ in range(50):
        optimizer.step(closure)
    after = closure().item()
    assert (after > before) if given.kwargs.get("maximize") else (after < before)


@pytest.mark.parametrize("group_has_lr", [True, False])
@pytest.mark.parametrize("schedule", range(len(ADAM.scheduler_inputs)))
def test_schedulers_of_adam(schedule: int, group_has_lr: bool) -> None:
    """With the schedulers that torch tries on Adam, also on groups of their own rates, the loss falls."""
    groups = {"lr": 0.05} if group_has_lr else {}
    optimizer, _, closure = linear_problem(
        lambda ps: SPlus([{"params": ps[:1]}, {"params": ps[1:], **groups}], lr=0.01),
    )
    schedulers = [make(optimizer) for make in ADAM.scheduler_inputs[schedule]]
    before = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        for scheduler in schedulers:
            scheduler.step(*([loss.item()] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert closure().item() < before


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    """It trains in every floating-point dtype, and parameters keep theirs."""
    optimizer, parameters, closure = linear_problem(SPlus, dtype)
    before = closure().item()
    for _ in range(30):
        optimizer.step(closure)
    assert closure().item() < before
    assert {parameter.dtype for parameter in parameters} == {dtype}


def test_mixed_dtypes() -> None:
    """One group may mix dtypes and shapes, with and without foreach."""
    for foreach in (None, True, False):
        parameters = [nn.Parameter(draws(1, 4, 4, seed=i, dtype=dtype)[0]) for i, dtype in enumerate(DTYPES)]
        optimizer = SPlus(parameters, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            sum(parameter.float().square().sum() for parameter in parameters).backward()
            optimizer.step()
        assert [parameter.dtype for parameter in parameters] == DTYPES
        assert {optimizer.state[parameter]["step"] for parameter in parameters} == {3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_default_dtype(dtype: torch.dtype) -> None:
    """The default dtype of torch has no say in the state of fp32 parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        optimizer, parameters = trained()
    finally:
        torch.set_default_dtype(before)
    for parameter, expected in zip(parameters, trained()[1]):
        assert torch.equal(parameter, expected)
        tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_step_without_gradients_is_a_noop(weight_decay: float) -> None:
    """A parameter without a gradient is not touched, nor is its state."""
    parameters = [nn.Parameter(draws(1, 5, 3, seed=i, dtype=torch.float32)[0]) for i in range(2)]
    optimizer = SPlus(parameters, weight_decay=weight_decay)
    before = copy.deepcopy(([p.detach() for p in parameters], optimizer.state_dict()["state"]))
    optimizer.step()
    for parameter, weights, state in zip(parameters, before[0], before[1].values()):
        assert parameter.grad is None
        assert torch.equal(parameter, weights)
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)) for key, value in state.items())
        assert optimizer.state[parameter]["step"] == state["step"] == 0


@pytest.mark.parametrize("given", INPUTS, ids=described)
def test_zero_gradients(given: OptimizerInput) -> None:
    """With zero gradients nothing but weight decay moves the weights."""
    parameters = [nn.Parameter(draws(1, 5, 3, dtype=torch.float32)[0])]
    settings = {"weight_decay": 0.0, **given.kwargs}
    optimizer = SPlus(parameters, **settings)
    before = parameters[0].detach().clone()
    drive(optimizer, parameters, [[torch.zeros(5, 3)]] * 3)
    assert torch.equal(parameters[0], before) == (settings["weight_decay"] == 0)
    assert optimizer.state[parameters[0]]["step"] == 3


# Groups


def test_weight_decay_of_groups() -> None:
    """A group's decay is its own: the one with a decay shrinks, the other keeps still under zero gradients."""
    parameters = [nn.Parameter(draws(1, 10, 5, dtype=torch.float64)[0]) for _ in range(2)]
    start = parameters[0].detach().clone()
    optimizer = SPlus([{"params": parameters[:1], "weight_decay": 0.3}, {"params": parameters[1:]}], weight_decay=0.0)
    drive(optimizer, parameters, [[torch.zeros(10, 5, dtype=torch.float64)] * 2] * 2)
    assert torch.equal(parameters[1], start)
    torch.testing.assert_close(parameters[0].detach(), start * (1 - 0.1 * 2 / 15 * 0.3) ** 2, rtol=1e-13, atol=0)


def test_learning_rate_of_groups() -> None:
    """A group without a rate has the default, a rate of 0 moves nothing."""
    parameters = [nn.Parameter(draws(1, 10, 5, dtype=torch.float64)[0]) for _ in range(3)]
    start = parameters[0].detach().clone()
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:2], "lr": 0.02},
        {"params": parameters[2:], "lr": 0.0},
    ]
    optimizer = SPlus(groups, lr=0.01, weight_decay=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.0]
    drive(optimizer, parameters, [[draws(1, 10, 5, seed=4)[0]] * 3])
    moved = [parameter.detach() - start for parameter in parameters]
    torch.testing.assert_close(moved[1], 2 * moved[0], rtol=1e-9, atol=1e-15)
    assert not moved[2].any()
    assert moved[0].any()


# State


def test_state_is_not_empty() -> None:
    """Every parameter has state, and its tensors are of its own device and not of its memory."""
    optimizer, parameters = trained()
    assert set(optimizer.state) == set(parameters)
    for parameter in parameters:
        tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        assert len(tensors) >= 2
        assert {tensor.device for tensor in tensors} == {parameter.device}
        assert all(tensor.data_ptr() != parameter.data_ptr() for tensor in tensors)


@pytest.mark.parametrize("named", [True, False])
def test_state_dict_is_deterministic(named: bool) -> None:
    """Loaded into a copy, both step in lockstep, and their state dicts stay equal; the loaded one is not modified."""

    def make(parameters: list[nn.Parameter]) -> SPlus:
        return SPlus(list(zip(("weight", "bias"), parameters)) if named else parameters)

    optimizer, parameters, closure = linear_problem(make)
    for _ in range(5):
        optimizer.step(closure)
    state_dict = copy.deepcopy(optimizer.state_dict())
    other, others, other_closure = linear_problem(make)
    with torch.no_grad():
        for mine, its in zip(others, parameters):
            mine.copy_(its)
    other.load_state_dict(state_dict)
    for _ in range(20):
        assert optimizer.step(closure).item() == other.step(other_closure).item()
        assert all(map(torch.equal, parameters, others))
    assert_same(other.state_dict(), optimizer.state_dict())
    assert state_dict["state"][0]["step"] == 5
    assert ("param_names" in state_dict["param_groups"][0]) == named


def test_save_and_load_with_weights_only() -> None:
    """The safe loader and the other give equal state dicts, equal to what was saved."""
    optimizer, _ = trained()
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        assert_same(loaded, optimizer.state_dict())


@pytest.mark.parametrize("mapped", ["loaded", "saved"])
def test_names_in_a_state_dict(mapped: str) -> None:
    """Names go through; parameters that were renamed load with a pre hook that renames them in the file."""

    def make(names: tuple[str, str]) -> SPlus:
        return trained(lambda ps: SPlus(list(zip(names, ps))))[0]

    source, target = make(("weight", "bias")), make(("weight1", "bias1"))

    def rename(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [{**g, "param_names": [f"{n}1" for n in g["param_names"]]} for g in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    if mapped == "loaded":
        target.register_load_state_dict_pre_hook(rename)
    else:
        source.register_state_dict_post_hook(rename)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["param_names"] == ["weight1", "bias1"]
    assert target.state_dict()["state"][0]["step"] == 5


def test_loading_step_numbers_that_are_tensors() -> None:
    """The steps in a file are numbers, or tensors as in Adam's; training goes on from them."""
    optimizer, _ = trained()
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["step"] = torch.tensor(float(state["step"]))
    other, parameters, closure = linear_problem(SPlus)
    other.load_state_dict(state_dict)
    other.step(closure)
    assert [other.state[parameter]["step"] for parameter in parameters] == [6, 6]


@pytest.mark.parametrize("before_steps", [True, False])
def test_deepcopy_copies_all_public_attributes(before_steps: bool) -> None:
    """A deep copy has the public attributes of the original."""
    optimizer, _ = trained(steps=0 if before_steps else 3)

    def public(of: SPlus) -> set[str]:
        return {name for name in vars(of) if not name.startswith("_")}

    assert public(copy.deepcopy(optimizer)) == public(optimizer)


def test_can_be_printed() -> None:
    """repr() names the class and every hyperparameter of every group, before and after steps."""
    for steps in (0, 2):
        optimizer, _ = trained(lambda ps: SPlus([{"params": ps[:1]}, {"params": ps[1:]}]), steps)
        text = repr(optimizer)
        assert text.startswith("SPlus (")
        assert "Parameter Group 1" in text
        assert all(f"{key}: " in text for key in optimizer.defaults)


# Hooks


def test_step_hooks_may_change_arguments() -> None:
    """A pre hook may replace the arguments of step(), as torch lets it."""
    optimizer, _, closure = linear_problem(SPlus)
    calls = []

    def counting() -> Tensor:
        calls.append("closure")
        return closure()

    handle = optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, counting), kwargs))
    assert optimizer.step() is not None
    handle.remove()
    assert optimizer.step() is None
    assert calls == ["closure"]


def test_global_and_own_step_hooks() -> None:
    """Hooks on all optimizers and on this one fire once a step, in torch's order."""
    optimizer, _, closure = linear_problem(SPlus)
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
    ]
    try:
        optimizer.step(closure)
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    assert calls == ["global pre", "pre", "post", "global post"] * 2


def test_state_dict_hooks() -> None:
    """Pre hooks see the optimizer, post hooks change the result; prepended ones come first."""
    optimizer, _ = trained()
    optimizer.register_state_dict_pre_hook(lambda o: o.param_groups[0].update(note=1))
    optimizer.register_state_dict_post_hook(lambda _, sd: sd.update(order=[*sd.get("order", []), "second"]))
    optimizer.register_state_dict_post_hook(lambda _, sd: sd.update(order=["first"]), prepend=True)
    state_dict = optimizer.state_dict()
    assert state_dict["param_groups"][0]["note"] == 1
    assert state_dict["order"] == ["first", "second"]


def test_load_state_dict_hooks_and_prepend() -> None:
    """The last pre hook has the last word, prepended ones the first; post hooks run after the load."""
    optimizer, _ = trained(lambda ps: SPlus(ps, lr=0.1))
    target, _ = trained(lambda ps: SPlus(ps, lr=0.3))

    def sets_lr(lr: float) -> Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]]:
        def hook(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {**state_dict, "param_groups": [{**group, "lr": lr} for group in state_dict["param_groups"]]}

        return hook

    target.register_load_state_dict_pre_hook(sets_lr(0.002))
    handle = target.register_load_state_dict_pre_hook(sets_lr(0.001), prepend=True)
    target.load_state_dict(optimizer.state_dict())
    assert target.param_groups[0]["lr"] == 0.002
    handle.remove()
    seen = []
    target.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    target.register_load_state_dict_post_hook(lambda o: o.param_groups[0].update(lr=0.004), prepend=True)
    target.load_state_dict(optimizer.state_dict())
    assert seen == [0.004]
