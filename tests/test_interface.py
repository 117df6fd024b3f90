"""The drop-in promise: SPlus takes what torch.optim.Adam takes, and is called as Adam is called."""

import copy
import inspect
import io
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from reference import draws, drive
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from splus import SPlus, param_groups

SHAPES = [(5, 4), (4, 4), (3, 2, 2, 2), (6,), ()]


def parameters_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(draws(1, *shape, seed=50 + i, dtype=dtype)[0]) for i, shape in enumerate(shapes or SHAPES)]


def gradients_of(steps: int, *shapes: tuple[int, ...], seed: int = 0) -> list[tuple[Tensor, ...]]:
    return list(zip(*(draws(steps, *shape, seed=seed + i) for i, shape in enumerate(shapes or SHAPES))))


def weights_after(
    make: Callable[[list[nn.Parameter]], SPlus], steps: int = 12, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    parameters = parameters_of(dtype=dtype)
    drive(make(parameters), parameters, [[g.to(dtype) for g in of_step] for of_step in gradients_of(steps)])
    return [parameter.detach() for parameter in parameters]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def everything(parameters: list[nn.Parameter], optimizer: SPlus) -> list[Any]:
    """All weights, state and hyperparameters, as a copy."""
    state = [optimizer.state[p][key] for p in parameters for key in sorted(optimizer.state[p])]
    options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return copy.deepcopy([[p.detach() for p in parameters], state, options])


def unchanged(before: list[Any], after: list[Any]) -> bool:
    """Bit for bit."""
    pairs = list(itertools.chain(*(zip(a, b) for a, b in zip(before, after))))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def regression(seed: int = 0) -> tuple[nn.Sequential, Callable[[], Tensor]]:
    """A small network and its loss on a fixed batch."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(0.4 * draws(1, *parameter.shape, seed=seed + i)[0])
    x, y = draws(2, 16, 6, seed=77, dtype=torch.float32)
    return model, lambda: (model(x) - y[:, :2]).square().mean()


# Arguments


def test_positional_arguments_are_those_of_adam() -> None:
    """The parameters up to the last that Adam takes by position have its names, in its order; the others are named."""
    of_adam = inspect.signature(torch.optim.Adam).parameters
    of_splus = inspect.signature(SPlus).parameters
    positional = [name for name, p in of_splus.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name, p in of_adam.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert set(of_adam) <= set(of_splus)
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in of_splus.values())


def test_positional_arguments_arrive() -> None:
    """lr, betas, eps, weight_decay by position mean what they mean by name."""
    group = SPlus(parameters_of(), 0.3, (0.8, 0.95), 1e-5, 0.2).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.3, (0.8, 0.95), 1e-5, 0.2)
    by_name = weights_after(lambda ps: SPlus(ps, lr=0.3, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.2))
    assert same(weights_after(lambda ps: SPlus(ps, 0.3, (0.8, 0.95), 1e-5, 0.2)), by_name)


@pytest.mark.parametrize("name", ["amsgrad", "capturable", "differentiable", "fused"])
def test_arguments_of_adam_that_cannot_be_honoured(name: str) -> None:
    """Set, they raise an error that names them and says why; at Adam's own default they are accepted."""
    with pytest.raises(ValueError, match=rf"{name}=True .* SPlus does not support it: .{{20,}}\. Leave it out\."):
        SPlus(parameters_of(), **{name: True})
    for value in {False, inspect.signature(torch.optim.Adam).parameters[name].default}:
        assert name not in SPlus(parameters_of(), **{name: value}).param_groups[0]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_foreach_changes_nothing(foreach: bool | None) -> None:
    """Adam's foreach is accepted whatever its value."""
    assert same(weights_after(lambda ps: SPlus(ps, foreach=foreach)), weights_after(SPlus))


@pytest.mark.parametrize("typo", ["wieght_decay", "precondition_freq", "momentum", "ns_steps", "ema"])
def test_unknown_arguments_are_refused(typo: str) -> None:
    """No argument is swallowed."""
    with pytest.raises(TypeError, match=typo):
        SPlus(parameters_of(), **{typo: 0.1})


INVALID: list[tuple[str, Any]] = [
    *(("lr", -0.1), ("lr", float("nan")), ("lr", torch.tensor(-0.1)), ("lr", torch.tensor([0.1, 0.1]))),
    *(("betas", (1.0, 0.9)), ("betas", (0.9, 1.0)), ("betas", (-0.1, 0.9)), ("betas", (0.9,))),
    *(("betas", (0.9, 0.99, 0.999)), ("betas", (float("nan"), 0.9))),
    *(("eps", -1e-8), ("eps", 1.0), ("weight_decay", -0.1), ("weight_decay", float("nan"))),
    *(("ema_decay", 1.0), ("ema_decay", -0.1), ("elementwise_scale", -1.0), ("width_power", -1.0)),
    *(("precondition_frequency", 0), ("precondition_frequency", 2.5), ("precondition_frequency", -3)),
    *(("max_preconditioner_dim", 0), ("max_preconditioner_dim", 100.0), ("refresh_growth", 1.0)),
    *(("whiten", "3d"), ("oversized", "block"), ("refresh_method", "svd"), ("split_dim", 2)),
    *(("spread_refreshes", "yes"), ("maximize", 3), ("split", 7), ("split", (1, 1))),
    ("matmul_dtype", torch.float16),
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_invalid_hyperparameters(name: str, value: Any) -> None:
    """Whether given to the constructor, a group or a later group: an error that has the name and what was given."""
    given = value
    if name == "lr" and isinstance(value, Tensor) and value.numel() > 1:
        given = tuple(value.shape)
    elif name == "betas" and len(value) == 2:
        given = next(beta for beta in value if not 0 <= beta < 1)
    for make in (
        lambda ps: SPlus(ps, **{name: value}),
        lambda ps: SPlus([{"params": ps, name: value}]),
        lambda ps: SPlus(parameters_of((2,))).add_param_group({"params": ps, name: value}),
    ):
        with pytest.raises(ValueError) as caught:
            make(parameters_of((3, 4), (5, 5)))
        assert name in str(caught.value)
        assert str(given) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", None), ("betas", 0.9), ("betas", (0.9, "x")), ("ema_decay", "much"), ("weight_decay", None)),
        *(("eps", ""), ("lr", "1e-3"), ("ema_decay", "0.9"), ("lr", torch.tensor(1 + 1j)), ("split", "ab")),
    ],
)
def test_hyperparameters_of_a_wrong_type(name: str, value: Any) -> None:
    """They raise an error that names the argument, and leave an optimizer that refuses a group as it was."""
    with pytest.raises((TypeError, ValueError), match=name):
        SPlus(parameters_of(), **{name: value})
    parameters, late = parameters_of(), nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer = SPlus(parameters)
    with pytest.raises((TypeError, ValueError), match=name):
        optimizer.add_param_group({"params": [late], name: value})
    assert len(optimizer.param_groups) == 1
    assert late not in optimizer.state
    optimizer.add_param_group({"params": [late]})
    drive(optimizer, [*parameters, late], gradients_of(1, *SHAPES, (3, 3)))
    assert optimizer.state[late]["step"] == 1


def test_betas_of_any_sequence() -> None:
    """Lists, and the lists of OmegaConf that Hydra passes, are kept as a tuple of floats, per group too."""
    from_hydra = OmegaConf.create({"betas": [0.8, 0.95]}).betas
    for betas in ([0.8, 0.95], from_hydra, (torch.tensor(0.8), torch.tensor(0.95))):
        optimizer = SPlus(
            [{"params": parameters_of((2, 2))}, {"params": parameters_of((3,)), "betas": betas}], betas=betas
        )
        for group in optimizer.param_groups:
            assert type(group["betas"]) is tuple
            assert [type(beta) for beta in group["betas"]] == [float, float]
            assert group["betas"] == pytest.approx((0.8, 0.95))


def test_sections_from_hydra() -> None:
    """So are sizes of sections, whoever is given them, the optimizer, a group or param_groups; a file has tuples."""
    from_hydra = OmegaConf.create({"split": [4, 2]}).split
    model = nn.Linear(3, 6, bias=False)
    for optimizer in (
        SPlus(model.parameters(), split=from_hydra),
        SPlus([{"params": model.parameters(), "split": from_hydra}]),
        SPlus([{"params": model.parameters(), "split": [from_hydra]}]),
        SPlus(param_groups(nn.ModuleDict({"fused": model, "out": nn.Linear(3, 3)}), split={"fused.*": from_hydra})),
    ):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        split = torch.load(file, weights_only=True)["param_groups"][0]["split"]
        assert (split[0] if isinstance(split, list) else split) == (4, 2)


PER_GROUP: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.3),
    "betas": ((0.9, 0.9), (0.5, 0.99)),
    "eps": (0.0, 0.05),
    "normalization_decay": (0.0, 0.9),
    "weight_decay": (0.0, 3.0),
    "ema_decay": (0.5, 0.99),
    "precondition_frequency": (2, 5),
    "max_preconditioner_dim": (100, 4),
    "elementwise_scale": (0.01, 0.1),
    "whiten": (True, False),
    "oversized": ("blocks", "unrotated"),
    "sides": ("auto", "shorter"),
    "matmul_dtype": (None, torch.float32),
    "width_power": (0.0, 1.0),
    "scale_weight_decay": (True, False),
    "step_norm": ("spectral", "frobenius"),
    "step_scale": ("shape", "none"),
    "refresh_method": ("qr", "eigh"),
    "refresh_growth": (None, 1.3),
    "spread_refreshes": (True, False),
    "maximize": (True, False),
    "split": (None, 2),
    "split_dim": (0, 1),
    "stacked": (False, True),
}


def test_every_hyperparameter_has_a_group_test() -> None:
    """The list above is complete."""
    group = SPlus(parameters_of()).param_groups[0]
    assert set(PER_GROUP) == set(group) - {"params", "training"}


@pytest.mark.parametrize("name", PER_GROUP)
def test_every_hyperparameter_can_be_set_per_group(name: str) -> None:
    """A group with a value of its own moves exactly as in an optimizer with that value; the other group does not."""
    shapes = {
        "stacked": [(2, 4, 4), (4, 2, 2)],
        "elementwise_scale": [(6,), (3,)],
        "oversized": [(6, 6), (8, 4)],
        "split_dim": [(4, 6), (6, 8)],
    }.get(name, [(6, 4), (4, 4), (6,)])
    others: dict[str, Any] = {
        "oversized": {"max_preconditioner_dim": 4, "whiten": True},
        "split_dim": {"split": 2},
        "width_power": {"whiten": False},
    }.get(name, {})

    def run(groups: Callable[[list[nn.Parameter]], list[dict[str, Any]]], **options: Any) -> list[Tensor]:
        parameters = parameters_of(*shapes, *shapes)
        settings = {
            "lr": 0.1,
            "weight_decay": 0.5,
            "precondition_frequency": 12,
            "refresh_growth": 2.0,
            **others,
            **options,
        }
        optimizer = SPlus(groups(parameters), **settings)
        drive(optimizer, parameters, gradients_of(30, *shapes, *shapes))
        return [p.detach() for p in parameters] + [optimizer.state[p]["average"] for p in parameters]

    half = len(shapes)
    first, second = PER_GROUP[name]
    mixed = run(lambda ps: [{"params": ps[:half]}, {"params": ps[half:], name: second}], **{name: first})
    one, other = (
        run(lambda ps: [{"params": ps[:half]}, {"params": ps[half:]}], **{name: value}) for value in (first, second)
    )
    for whole in (0, 2 * half):
        assert same(mixed[whole : whole + half], one[whole : whole + half])
        assert same(mixed[whole + half : whole + 2 * half], other[whole + half : whole + 2 * half])
    assert not same(mixed, one)
    assert not same(mixed, other)


# The learning rate as a tensor


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_learning_rate(shape: tuple[int, ...]) -> None:
    """A tensor of one element is that number, and changing it in place takes effect in the next step."""

    def run(lr: Any, change: Callable[[SPlus], object]) -> list[Tensor]:
        parameters = parameters_of()
        optimizer = SPlus(parameters, lr=lr)
        for t, of_step in enumerate(gradients_of(6)):
            if t == 3:
                change(optimizer)
            drive(optimizer, parameters, [of_step])
        return [parameter.detach() for parameter in parameters]

    lr = torch.full(shape, 0.125, dtype=torch.float64)
    by_tensor = run(lr, lambda optimizer: lr.fill_(0.5))
    assert same(by_tensor, run(0.125, lambda optimizer: optimizer.param_groups[0].update(lr=0.5)))
    assert not same(by_tensor, run(0.125, lambda optimizer: None))


def test_scheduler_fills_a_tensor_learning_rate() -> None:
    """A scheduler changes the tensor in place, as with Adam."""
    lr = torch.tensor(0.5)
    optimizer = SPlus(parameters_of(), lr=lr)
    scheduler = schedulers.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25


# Schedulers

CYCLE: dict[str, Any] = {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, step_size=3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=3),
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 5)], milestones=[3]
    ),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, total_iters=4), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, **CYCLE),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.2, total_steps=12),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    """A scheduler that torch adds is noticed here."""
    assert set(SCHEDULERS) == set(schedulers.__all__) - {"LRScheduler"} | {"SWALR"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str) -> None:
    """It gives SPlus the rates it gives Adam, without a warning, and every parameter's step follows them alike.

    With gradients of full rank and no threshold, a step has the size lr times a constant of the shape exactly.
    """
    parameters = parameters_of((5, 4), (4, 4), (3, 2, 2, 2), (6,), ())
    optimizer = SPlus(parameters, lr=0.1, eps=0.0, weight_decay=0.0, step_norm="frobenius", normalization_decay=0.0)
    adam = torch.optim.Adam(parameters_of(), lr=0.1)
    pair = SCHEDULERS[name](optimizer), SCHEDULERS[name](adam)
    rates, sizes = [], []
    for of_step in gradients_of(10):
        assert optimizer.param_groups[0]["lr"] == adam.param_groups[0]["lr"]
        rates.append(optimizer.param_groups[0]["lr"])
        before = [parameter.detach().clone() for parameter in parameters]
        drive(optimizer, parameters, [of_step])
        adam.step()
        sizes.append(torch.stack([(p.detach() - start).norm() for p, start in zip(parameters, before)]))
        for scheduler in pair:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(set(rates)) > 1
    for rate, size in zip(rates, sizes):
        torch.testing.assert_close(size / sizes[0], torch.full_like(size, rate / rates[0]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "make", [partial(schedulers.CyclicLR, **CYCLE), partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=9)]
)
def test_cycled_beta1_is_used(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Schedulers that cycle the momentum do so as with Adam, and the momentum follows β1 of each step; β2 stays."""
    parameters = parameters_of((4, 3), (5,))
    optimizer, adam = SPlus(parameters), torch.optim.Adam(parameters_of())
    pair = make(optimizer), make(adam)
    momenta = [torch.zeros_like(parameter) for parameter in parameters]
    seen = set()
    for of_step in gradients_of(8, (4, 3), (5,)):
        beta1, beta2 = optimizer.param_groups[0]["betas"]
        assert beta1 == adam.param_groups[0]["betas"][0]
        assert beta2 == optimizer.defaults["betas"][1]
        seen.add(beta1)
        drive(optimizer, parameters, [of_step])
        momenta = [beta1 * M + (1 - beta1) * G for M, G in zip(momenta, of_step)]
        torch.testing.assert_close([optimizer.state[p]["momentum"] for p in parameters], momenta)
        adam.step()
        for scheduler in pair:
            scheduler.step()
    assert len(seen) > 3


# Gradient scaling and clipping


def scaled_run(scale: float, overflow_at: int | None = None) -> tuple[list[Tensor], list[bool]]:
    """Train through a GradScaler; its weights at the end, and for each step whether anything changed."""
    model, loss = regression()
    parameters = list(model.parameters())
    optimizer = SPlus(parameters, lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    changed = []
    for t in range(10):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        if t == overflow_at:
            parameters[0].grad[0, 0] = torch.inf
        before = everything(parameters, optimizer)
        scaler.step(optimizer)
        scaler.update()
        changed.append(not unchanged(before, everything(parameters, optimizer)))
    return [parameter.detach() for parameter in parameters], changed


def test_scale_of_the_loss_does_not_matter() -> None:
    """A GradScaler at 2¹⁶ and at 1 give the same weights bit for bit."""
    assert same(scaled_run(2.0**16)[0], scaled_run(1.0)[0])


def test_step_skipped_by_the_scaler() -> None:
    """Where the scaler finds an overflow, weights, averages, factors and counters stay as they are."""
    assert scaled_run(2.0**16, overflow_at=4)[1] == [t != 4 for t in range(10)]
    assert scaled_run(2.0**16, overflow_at=0)[1] == [t != 0 for t in range(10)]


def test_state_after_the_scaler_skipped_the_first_step() -> None:
    """state_dict() and eval() work before any step was taken, with gradients attached, and move no weight."""
    model, loss = regression()
    optimizer = SPlus(model.parameters())
    loss().backward()
    before = everything(list(model.parameters()), optimizer)
    SPlus(regression()[0].parameters()).load_state_dict(optimizer.state_dict())
    optimizer.eval().train()
    assert unchanged(before, everything(list(model.parameters()), optimizer))


def test_no_gradients_at_all() -> None:
    """Plain steps are no-ops that count nothing; a scaler raises its own assertion, as with Adam."""
    parameters = parameters_of()
    optimizer = SPlus(parameters)
    before = everything(parameters, optimizer)
    for _ in range(3):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)
    assert unchanged(before, everything(parameters, optimizer))


def test_scaler_forbids_closures() -> None:
    """The scaler's own message about closures comes through."""
    optimizer = SPlus(parameters_of())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 0.0)


def test_gradients_clipped_in_place_are_the_ones_used() -> None:
    """clip_grad_norm_ before the step is seen by it."""
    parameters = parameters_of((4, 4), (3,))
    optimizer = SPlus(parameters, betas=(0.5, 0.9))
    for parameter, gradient in zip(parameters, gradients_of(1, (4, 4), (3,))[0]):
        parameter.grad = 100 * gradient
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    momenta = torch.cat([optimizer.state[p]["momentum"].flatten() for p in parameters])
    assert momenta.norm().item() == pytest.approx(0.5, rel=1e-5)


# Closures, hooks, zero_grad


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("returns", ["tensor", "float"])
def test_closures(returns: str, by_name: bool) -> None:
    """A closure runs once a step, with gradients enabled, its loss is returned, and training is as without."""
    model, loss = regression()
    optimizer = SPlus(model.parameters())
    calls = []

    def closure() -> Any:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        calls.append(value.item())
        return value if returns == "tensor" else value.item()

    for t in range(5):
        with torch.no_grad():
            returned = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert len(calls) == t + 1
        assert (returned.item() if returns == "tensor" else returned) == calls[-1]
    plain, loss = regression()
    twin = SPlus(plain.parameters())
    for _ in range(5):
        twin.zero_grad()
        loss().backward()
        assert twin.step() is None
    assert same([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])


def test_error_in_a_closure_changes_nothing() -> None:
    """What a closure raises goes through before anything was updated."""
    parameters = parameters_of()
    optimizer = SPlus(parameters)
    drive(optimizer, parameters, gradients_of(2))
    before = everything(parameters, optimizer)

    def closure() -> float:
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        optimizer.step(closure)
    assert unchanged(before, everything(parameters, optimizer))
    assert torch.is_grad_enabled()


def test_step_hooks_fire_once() -> None:
    """Hooks before and after a step fire once each, around the update; a copy trains without them, as with Adam."""
    parameters = parameters_of((3, 3))
    optimizer = SPlus(parameters)
    calls: list[tuple[str, int]] = []

    def note(when: str) -> Callable[..., None]:
        return lambda o, *_: calls.append((when, o.state[parameters[0]]["step"]))

    optimizer.register_step_pre_hook(note("before"))
    handle = optimizer.register_step_post_hook(note("after"))
    drive(optimizer, parameters, gradients_of(2, (3, 3)))
    assert calls == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    handle.remove()
    optimizer.step()
    copy.deepcopy(optimizer).step()
    assert calls[4:] == [("before", 2)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    """Gradients go, or become zero; with zero ones a parameter is stepped, with none it is not."""
    parameters = parameters_of()
    optimizer = SPlus(parameters)
    drive(optimizer, parameters, gradients_of(1))
    optimizer.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in parameters)
    optimizer.step()
    assert {optimizer.state[p]["step"] for p in parameters} == {1 if set_to_none else 2}


# Gradients that cannot be used


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_gradients(sparse_first: bool) -> None:
    """They are an error with advice that names the parameter; no group has been touched then."""
    embedding, linear = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4)
    groups = [{"params": [("table", embedding.weight)]}, {"params": list(linear.named_parameters())}]
    optimizer = SPlus(groups if sparse_first else groups[::-1])
    parameters = [embedding.weight, *linear.parameters()]
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = everything(parameters, optimizer)
    with pytest.raises(RuntimeError, match=r"'table' .*sparse.*sparse=False.*SparseAdam"):
        optimizer.step()
    assert unchanged(before, everything(parameters, optimizer))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.complex64}, "complex.*view_as_complex"),
        ({"dtype": torch.int64}, "int64.*floating-point"),
        ({"device": "meta"}, "meta.*Materialize"),
    ],
)
def test_parameters_of_other_kinds(options: dict[str, Any], message: str) -> None:
    """Complex, integer and empty parameters are refused when the optimizer is made, by name where there is one."""
    odd = torch.zeros(3, 3, **options)
    with pytest.raises(ValueError, match=message):
        SPlus([nn.Parameter(torch.zeros(2)), odd])
    with pytest.raises(ValueError, match=f"'phase'.*{message}"):
        SPlus([("phase", odd)])
    optimizer = SPlus(parameters_of())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [odd]})
    assert len(optimizer.param_groups) == 1


def bad_step(optimizer: SPlus, parameters: list[nn.Parameter], bad: dict[int, float], step: int = 0) -> None:
    """Step with one entry that is not finite in the gradients of the parameters ``bad``."""
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients_of(1, seed=step)[0])):
        parameter.grad = gradient.clone()
        if i in bad:
            parameter.grad.view(-1)[-1] = bad[i]
    optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("position", range(len(SHAPES)))
def test_gradient_that_is_not_finite(position: int, value: float) -> None:
    """Its parameter sits the step out, bit for bit, as if it had no gradient; said once, by name; the others step."""
    names = ["a", "b", "c", "d", "e"]
    runs = []
    for with_gradient in (True, False):
        parameters = parameters_of()
        optimizer = SPlus(list(zip(names, parameters)), weight_decay=1.0)
        drive(optimizer, parameters, gradients_of(3, seed=20))
        alone = everything([parameters[position]], optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                if with_gradient:
                    bad_step(optimizer, parameters, {position: value}, step)
                else:
                    of_step = gradients_of(1, seed=step)[0]
                    drive(optimizer, parameters, [[g if i != position else None for i, g in enumerate(of_step)]])
        said = [str(warning.message) for warning in caught]
        assert len(said) == int(with_gradient)
        assert not said or f"parameter {names[position]!r}" in said[0]
        assert unchanged(alone, everything([parameters[position]], optimizer))
        drive(optimizer, parameters, gradients_of(3, seed=30))
        runs.append(everything(parameters, optimizer))
    assert unchanged(runs[0], runs[1])


@pytest.mark.filterwarnings("ignore:A gradient that is not finite")
def test_gradients_that_stay_not_finite() -> None:
    """The tenth in a row is an error that names the parameter and what to try; one good step starts the count anew."""
    parameters = parameters_of()
    optimizer = SPlus(parameters)
    for _ in range(2):
        for step in range(9):
            bad_step(optimizer, parameters, {1: float("nan")}, step)
        bad_step(optimizer, parameters, {})
    for step in range(9):
        bad_step(optimizer, parameters, {1: float("nan")}, step)
    before = everything(parameters, optimizer)
    with pytest.raises(RuntimeError, match=r"not finite.*parameter 1 of group 0, shape \(4, 4\), 10 times.*rate"):
        bad_step(optimizer, parameters, {1: float("nan")})
    assert unchanged(before, everything(parameters, optimizer))
    bad_step(optimizer, parameters, {})
    assert [optimizer.state[p]["step"] for p in parameters] == [30, 3, 30, 30, 30]


@pytest.mark.filterwarnings("ignore:A gradient that is not finite")
def test_faults_alternating_between_parameters_are_not_in_a_row() -> None:
    """Each parameter has its own count."""
    parameters = parameters_of()
    optimizer = SPlus(parameters)
    for step in range(24):
        bad_step(optimizer, parameters, {step % 2: float("inf")}, step)
    assert [optimizer.state[p]["step"] for p in parameters] == [12, 12, 24, 24, 24]


@pytest.mark.filterwarnings("ignore:A gradient that is not finite")
def test_faults_in_a_second_group() -> None:
    """The first group steps while they are let pass, and nothing is half-written when they raise."""
    parameters = parameters_of((4, 4), (3,), (4, 4), (3,))
    optimizer = SPlus([{"params": parameters[:2]}, {"params": parameters[2:]}])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    parameters[3].grad.fill_(torch.nan)
    for step in range(1, 10):
        optimizer.step()
        assert [optimizer.state[p]["step"] for p in parameters] == [step, step, step, 0]
    before = everything(parameters, optimizer)
    with pytest.raises(RuntimeError, match="parameter 1 of group 1"):
        optimizer.step()
    assert unchanged(before, everything(parameters, optimizer))


# Parameters and groups


def test_is_an_optimizer_of_torch() -> None:
    """Tools that look for torch.optim.Optimizer find one, and it can be printed."""
    optimizer = SPlus(parameters_of(), lr=0.25)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "SPlus" in repr(optimizer)
    assert "lr: 0.25" in repr(optimizer)


def test_empty_parameter_list() -> None:
    """No parameters at all are an error, as with Adam; so is a model that is all frozen and filtered."""
    for empty in ([], (p for p in parameters_of() if not p.requires_grad)):
        with pytest.raises(ValueError, match="empty parameter list"):
            SPlus(empty)


@pytest.mark.parametrize("only", [(4, 3), (5,), (), (2, 3, 2, 2)])
def test_parameters_of_one_kind_only(only: tuple[int, ...]) -> None:
    """Only matrices, only vectors, only a scalar: all of them train, swap and save."""
    parameters = parameters_of(only)
    optimizer = SPlus(parameters)
    drive(optimizer, parameters, gradients_of(5, only))
    optimizer.eval().train()
    SPlus(parameters_of(only)).load_state_dict(optimizer.state_dict())
    assert optimizer.state[parameters[0]]["step"] == 5


def test_ways_to_give_parameters() -> None:
    """A list, a generator, named ones, dictionaries and param_groups of the same model make the same steps."""
    runs = []
    for give in (
        lambda model: list(model.parameters()),
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: [{"params": model.parameters()}],
        lambda model: ({"params": [parameter]} for parameter in model.parameters()),
        lambda model: [{"params": model.named_parameters(), "name": "all of them"}],
    ):
        model, loss = regression()
        optimizer = SPlus(give(model), spread_refreshes=False)
        for _ in range(6):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        runs.append([parameter.detach() for parameter in model.parameters()])
    assert all(same(run, runs[0]) for run in runs)


def test_names_are_kept() -> None:
    """Names of parameters are in the group, under the key that torch gives them."""
    model, _ = regression()
    names = [name for name, _ in model.named_parameters()]
    assert SPlus(model.named_parameters()).param_groups[0]["param_names"] == names


def test_group_added_late() -> None:
    """New parameters start fresh and step with their own options; the ones before are not disturbed."""
    runs = []
    for adds in (True, False):
        parameters, late = parameters_of(), parameters_of((4, 4), (3,))
        optimizer = SPlus(parameters, lr=0.1)
        drive(optimizer, parameters, gradients_of(5))
        if adds:
            optimizer.add_param_group({"params": late, "lr": 0.5, "weight_decay": 0.0})
            assert [optimizer.state[p]["step"] for p in late] == [0, 0]
        shapes = (*SHAPES, (4, 4), (3,))
        drive(optimizer, [*parameters, *late], gradients_of(5, *shapes, seed=9))
        runs.append([parameter.detach() for parameter in parameters])
        if adds:
            alone = parameters_of((4, 4), (3,))
            drive(SPlus(alone, lr=0.5, weight_decay=0.0), alone, [g[5:] for g in gradients_of(5, *shapes, seed=9)])
            assert same([p.detach() for p in late], [p.detach() for p in alone])
            assert {group["ema_decay"] for group in optimizer.param_groups} == {optimizer.defaults["ema_decay"]}
    assert same(*runs)


def test_groups_made_of_another_optimizers() -> None:
    """The groups of an optimizer, even one in eval mode, make a new one, which is in train mode as every new one is."""
    first = SPlus(parameters_of(), lr=0.3).eval()
    second = SPlus([dict(group) for group in first.param_groups], lr=0.1)
    assert second.training
    assert second.param_groups[0]["lr"] == 0.3
    drive(second, second.param_groups[0]["params"], gradients_of(2))
    second.eval().train()


def test_group_taken_out() -> None:
    """As with Adam, a group that is deleted from param_groups is not stepped, and the others keep their own options."""
    kept, deleted = parameters_of((4, 4), (3,)), parameters_of((4, 4), (3,))
    optimizer = SPlus([{"params": deleted, "lr": 0.1}, {"params": kept, "lr": 0.5}])
    start = [parameter.detach().clone() for parameter in deleted]
    del optimizer.param_groups[0]
    drive(optimizer, [*kept, *deleted], [(*of_step, *of_step) for of_step in gradients_of(4, (4, 4), (3,))])
    optimizer.eval().train()
    alone = parameters_of((4, 4), (3,))
    drive(SPlus(alone, lr=0.5), alone, gradients_of(4, (4, 4), (3,)))
    assert same([p.detach() for p in deleted], start)
    assert same([p.detach() for p in kept], [p.detach() for p in alone])


def test_parameters_put_in_the_place_of_others() -> None:
    """As with Adam, tools may put other parameters into a group: they start afresh, and the ones that stay go on."""
    parameters, (replacement,) = parameters_of((4, 4), (4, 4)), parameters_of((4, 4))
    optimizer = SPlus(parameters, spread_refreshes=False)
    gradients = gradients_of(8, (4, 4), (4, 4))
    drive(optimizer, parameters, gradients[:4])
    optimizer.param_groups[0]["params"] = [parameters[0], replacement]
    drive(optimizer, [parameters[0], replacement], gradients[4:])
    undisturbed, (alone,) = parameters_of((4, 4), (4, 4)), parameters_of((4, 4))
    drive(SPlus(undisturbed, spread_refreshes=False), undisturbed, gradients)
    drive(SPlus([alone], spread_refreshes=False), [alone], [[G] for _, G in gradients[4:]])
    assert torch.equal(parameters[0], undisturbed[0])
    assert torch.equal(replacement, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_model_cast_after_the_optimizer_was_made(dtype: torch.dtype) -> None:
    """State is made with the optimizer, so a model that is cast later is an error that says which way round it goes."""
    model = nn.Linear(4, 4)
    optimizer = SPlus(model.named_parameters())
    model.to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=f"'weight'.*{dtype}.*before"):
        optimizer.step()
    assert same(before, [parameter.detach() for parameter in model.parameters()])


# With the rest of torch


def test_parametrized_weights_train() -> None:
    """torch.nn.utils.parametrize moves the parameter elsewhere; it is found there, and trains."""
    model, loss = regression()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[2])
    optimizer = SPlus(param_groups(model), lr=0.1)
    first = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    with optimizer.averaged():
        assert loss().item() < first
    assert loss().item() < first


def test_gradients_that_carry_a_graph() -> None:
    """After backward(create_graph=True) the state is detached, is not kept alive by a graph, and steps the same."""
    runs = []
    for create_graph in (True, False):
        model, loss = regression()
        optimizer = SPlus(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")
                loss().backward(create_graph=create_graph)
            assert {p.grad.requires_grad for p in model.parameters()} == {create_graph}
            optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                assert not isinstance(value, Tensor) or (value.grad_fn is None and not value.requires_grad)
        assert all(p.is_leaf and p.requires_grad for p in model.parameters())
        runs.append([parameter.detach() for parameter in model.parameters()])
    assert same(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_in_inference_mode(dtype: torch.dtype) -> None:
    """Swapping inside torch.inference_mode(), one way or both, leaves parameters and state that train on as before."""
    runs = []
    for evaluates in ("not", "inside", "across"):
        parameters = parameters_of(dtype=dtype)
        optimizer = SPlus(parameters)
        for of_step in gradients_of(6):
            drive(optimizer, parameters, [[G.to(dtype) for G in of_step]])
            with torch.inference_mode():
                if evaluates == "inside":
                    optimizer.eval().train()
                elif evaluates == "across":
                    optimizer.eval()
            optimizer.train()
        assert not any(
            value.is_inference()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        runs.append([parameter.detach() for parameter in parameters])
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


def test_step_leaves_gradients_alone() -> None:
    """Gradients are read and not written, also by maximize, so that they can be logged or accumulated into."""
    for maximize in (False, True):
        parameters = parameters_of()
        optimizer = SPlus(parameters, maximize=maximize)
        drive(optimizer, parameters, gradients_of(3))
        last = gradients_of(3)[-1]
        assert same([p.grad for p in parameters], list(last))


def test_step_keeps_the_random_state() -> None:
    """Neither making an optimizer nor stepping, swapping or measuring draws random numbers."""
    parameters = parameters_of()
    before = torch.get_rng_state()
    optimizer = SPlus(parameters)
    drive(optimizer, parameters, gradients_of(3))
    optimizer.eval().train()
    optimizer.metrics()
    assert torch.equal(torch.get_rng_state(), before)


# Groups and state changed by hand


def test_group_taken_out_in_eval_mode_leaves_with_its_own_weights() -> None:
    """Weights that the average had replaced come back, and the next state dict is of the groups there are."""
    deleted, kept = parameters_of((4, 4), (3,)), parameters_of((4, 4))
    optimizer = SPlus([{"params": deleted}, {"params": kept}])
    drive(optimizer, [*deleted, *kept], gradients_of(4, (4, 4), (3,), (4, 4)))
    before = [parameter.detach().clone() for parameter in (*deleted, *kept)]
    optimizer.eval()
    del optimizer.param_groups[0]
    optimizer.train()
    assert same([parameter.detach() for parameter in (*deleted, *kept)], before)
    assert set(optimizer.state) == set(kept)


def test_state_cleared_by_hand_starts_afresh() -> None:
    """As with Adam, an optimizer whose state is cleared goes on as a new one."""
    parameters, twins = parameters_of((4, 4), (3,)), parameters_of((4, 4), (3,))
    optimizer = SPlus(parameters)
    drive(optimizer, parameters, gradients_of(4, (4, 4), (3,)))
    with torch.no_grad():
        for parameter, twin in zip(parameters, twins):
            twin.copy_(parameter)
    optimizer.state.clear()
    drive(optimizer, parameters, gradients_of(4, (4, 4), (3,)))
    drive(SPlus(twins), twins, gradients_of(4, (4, 4), (3,)))
    assert same([parameter.detach() for parameter in parameters], [twin.detach() for twin in twins])


def test_state_dict_after_parameters_were_replaced() -> None:
    """A state dict asked for before the next step is of the parameters that are in the groups now."""
    optimizer = SPlus(parameters_of((4, 4), (3,)))
    optimizer.param_groups[0]["params"] = parameters_of((5, 5))
    assert [tuple(state["average"].shape) for state in optimizer.state_dict()["state"].values()] == [(5, 5)]


NUMBERS: dict[str, Any] = {
    **{name: np.float32(0.25) for name in ("lr", "eps", "weight_decay", "ema_decay", "elementwise_scale")},
    **{name: np.bool_(False) for name in ("scale_weight_decay", "whiten", "spread_refreshes", "maximize", "stacked")},
    **{name: np.int64(7) for name in ("precondition_frequency", "max_preconditioner_dim")},
    **{"width_power": np.array(0.5), "refresh_growth": np.float64(1.5), "split": np.int64(2), "split_dim": np.int64(1)},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_other_libraries(name: str) -> None:
    """A number of numpy is that number, and a plain one in the group and the file, whoever is given it."""
    value = NUMBERS[name]
    kind = {"f": float, "b": bool, "i": int}[value.dtype.kind]
    for optimizer in (
        SPlus(parameters_of((4, 4)), **{name: value}),
        SPlus([{"params": parameters_of((4, 4)), name: value}]),
    ):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        for group in (optimizer.param_groups[0], torch.load(file, weights_only=True)["param_groups"][0]):
            assert type(group[name]) is kind
            assert group[name] == value


@pytest.mark.parametrize(
    ("number", "truth", "limit"), [(0, False, 9), (np.bool_(False), False, 9), (1, True, 3), (np.bool_(True), True, 3)]
)
def test_whiten_as_a_number(number: Any, truth: bool, limit: int) -> None:
    """0 and 1, as Hydra's command line may pass them, are no and yes; neither is "auto"."""
    given, expected, auto = (
        weights_after(lambda ps, value=value: SPlus(ps, whiten=value, max_preconditioner_dim=limit))  # type: ignore[misc]
        for value in (number, truth, "auto")
    )
    assert same(given, expected)
    assert not same(given, auto)


# Options changed on a group whose state is made


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(("max_preconditioner_dim", 4, r"factor_left .*\(5, 5\).*None"), ("whiten", False, "factor_left")),
        *(("sides", "shorter", r"factor_left .*\(5, 5\).*None"), ("step_norm", "frobenius", "singular_vector")),
        *(("stacked", True, r"factor_left .*\(3, 3\).*\(6, 2, 2\)"), ("split", 2, "split=2")),
    ],
)
def test_option_that_does_not_fit_the_state(name: str, value: Any, message: str, mode: bool) -> None:
    """An option set on a group that asks for other shapes is an error in all that uses it, changes nothing else, and
    goes away when it is set back."""
    parameters, twins = parameters_of(), parameters_of()
    optimizer, undisturbed = SPlus(parameters), SPlus(twins)
    for by, of in ((optimizer, parameters), (undisturbed, twins)):
        drive(by, of, gradients_of(5))
        by.train(mode)
    before = everything(parameters, optimizer)
    given = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    uses: list[Callable[[], object]] = [
        *(optimizer.state_dict, optimizer.metrics, lambda: optimizer.train(not mode), lambda: copy.deepcopy(optimizer)),
        lambda: optimizer.load_state_dict(undisturbed.state_dict()),
        lambda: optimizer.add_param_group({"params": parameters_of((2, 2))}),
        *([optimizer.step] if mode else []),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()
    optimizer.param_groups[0][name] = given
    assert unchanged(before, everything(parameters, optimizer))
    assert len(optimizer.param_groups) == 1
    for by, of in ((optimizer.train(), parameters), (undisturbed.train(), twins)):
        drive(by, of, gradients_of(5, seed=9))
    assert same([p.detach() for p in parameters], [p.detach() for p in twins])


@pytest.mark.parametrize(
    ("name", "value"), [("step_scale", "none"), ("matmul_dtype", torch.float32), ("oversized", "unrotated")]
)
def test_option_that_fits_the_state(name: str, value: Any) -> None:
    """One that leaves the shapes as they are is used from the next step on, as in a copy and a resumed run."""
    parameters = parameters_of()
    optimizer = SPlus(parameters, lr=0.1, max_preconditioner_dim=100)
    drive(optimizer, parameters, gradients_of(5))
    plain, changed = copy.deepcopy((parameters, optimizer)), (parameters, optimizer)
    optimizer.param_groups[0][name] = value
    twins = copy.deepcopy(changed)
    for of, by in (plain, changed, twins):
        drive(by, of, gradients_of(15, seed=9))
    ends = [[p.detach() for p in of] for of, _ in (plain, changed, twins)]
    assert same(ends[1], ends[2])
    assert same(ends[0], ends[1]) == (name == "oversized")
