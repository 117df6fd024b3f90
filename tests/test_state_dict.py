"""Saving, loading, copying: a resumed or copied run is the uninterrupted one, and a wrong file changes nothing."""

import copy
import inspect
import io
import itertools
import pickle
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import draws
from torch import Tensor, nn

from splus import PAPER, SPlus, param_groups

# Periodic refreshes start at step 10 and matrices take turns.
BASE: dict[str, Any] = {"ema_decay": 0.9, "weight_decay": 0.5, "precondition_frequency": 3}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "blocks": {"max_preconditioner_dim": 5, "whiten": True},
    "unrotated": {"max_preconditioner_dim": 9, "whiten": True, "oversized": "unrotated"},
    "published": {**PAPER, "precondition_frequency": 3, "max_preconditioner_dim": 9},
    "groups": {},
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHORT, LONG = range(8), range(8, 20)


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two matrices of one shape, a convolution, a tall and a wide one, vectors."""
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 6), nn.Tanh()),
        *(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)),
    )
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(0.4 * draws(1, *parameter.shape, seed=100 * seed + i)[0])
    return model.to(dtype)


def optimizer_of(model: nn.Module, kind: str = "default", **options: Any) -> SPlus:
    parameters = param_groups(model, split={"5.weight": 2}) if kind == "groups" else model.parameters()
    return SPlus(parameters, **{**BASE, **KINDS[kind], **options})


def losses(model: nn.Module, optimizer: SPlus, steps: range) -> list[float]:
    """Train; the batch of a step depends on its number alone."""
    values = []
    for step in steps:
        x = draws(8, 2, 3, 3, seed=step, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = (model(x) - x.flatten(1)[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def trained(kind: str = "default", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Sequential, SPlus]:
    model = network(dtype)
    optimizer = optimizer_of(model, kind, **options)
    losses(model, optimizer, SHORT)
    return model, optimizer


def filed(value: Any) -> Any:
    """What comes back from a file through the loader that admits tensors and plain values only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All that a step or a load could change, as a copy."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two structures of tensors and values are not the same bit for bit, dtypes and types included."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {a.keys() ^ b.keys()}"]
        return [found for key in a for found in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)):
        pairs = enumerate(itertools.zip_longest(a, b))
        return [found for i, (x, y) in pairs for found in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a} and {b}"]


def storages(value: Any) -> set[int]:
    """The memory that the tensors of a structure live in."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(storages, items))


# Round trips

SWAPS: dict[str, Callable[[SPlus], object]] = {
    "training": lambda optimizer: None,
    "in eval mode": lambda optimizer: optimizer.eval(),
    "after eval mode": lambda optimizer: optimizer.eval().train(),
}


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_exact(kind: str, dtype: torch.dtype, mode: bool) -> None:
    """What is loaded is saved again bit for bit, in either mode, through the safe loader; dtypes and mode included."""
    _, optimizer = trained(kind, dtype)
    optimizer.train(mode)
    state_dict = filed(optimizer.state_dict())
    assert differences(state_dict, optimizer.state_dict()) == []
    fresh = optimizer_of(network(dtype, seed=1), kind)
    fresh.load_state_dict(state_dict)
    assert differences(fresh.state_dict(), state_dict) == []
    assert fresh.training == mode


@pytest.mark.parametrize("optimizer_first", [True, False])
@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("default", torch.bfloat16)])
def test_resumed_run_is_the_uninterrupted_one(kind: str, dtype: torch.dtype, swap: str, optimizer_first: bool) -> None:
    """On whichever side of a swap the save falls: the same losses, weights, averages and state from there on."""
    model, optimizer = trained(kind, dtype)
    SWAPS[swap](optimizer)
    saved_model, saved_optimizer = filed(model.state_dict()), filed(optimizer.state_dict())
    optimizer.train()
    expected = losses(model, optimizer, LONG)

    resumed = network(dtype, seed=1)
    restored = optimizer_of(resumed, kind)
    if not optimizer_first:
        resumed.load_state_dict(saved_model)
    restored.load_state_dict(saved_optimizer)
    if optimizer_first:
        resumed.load_state_dict(saved_model)
    restored.train()
    assert losses(resumed, restored, LONG) == expected
    for mode in (True, False):
        optimizer.train(mode)
        restored.train(mode)
        assert differences(everything(resumed, restored), everything(model, optimizer)) == []


@pytest.mark.parametrize("saved_in", [True, False])
@pytest.mark.parametrize("actions", list(itertools.permutations(["eval", "train", "step", "state_dict"])))
def test_any_order_of_calls_after_a_load(actions: tuple[str, ...], saved_in: bool) -> None:
    """A fresh optimizer that was loaded does what the original does, whatever is called first."""
    model, optimizer = trained()
    optimizer.train(saved_in)
    resumed = network(seed=1)
    restored = optimizer_of(resumed)
    resumed.load_state_dict(filed(model.state_dict()))
    restored.load_state_dict(filed(optimizer.state_dict()))
    for action in actions:
        for of, by in ((model, optimizer), (resumed, restored)):
            if action != "step":
                getattr(by, action)()
            elif by.training:
                losses(of, by, LONG[:2])
            else:
                with pytest.raises(RuntimeError, match="averaged weights"):
                    by.step()
        assert differences(everything(resumed, restored), everything(model, optimizer)) == []


def test_state_is_plain() -> None:
    """A state dict holds tensors, numbers, strings and None in dicts, lists and tuples: what every loader admits."""

    def leaves(value: Any) -> list[type]:
        if type(value) in (dict, list, tuple):
            items = value.values() if isinstance(value, dict) else value
            return [leaf for item in items for leaf in leaves(item)]
        return [type(value)]

    for kind in KINDS:
        _, optimizer = trained(kind, lr=torch.tensor(0.1))
        assert set(leaves(optimizer.state_dict())) <= {Tensor, int, float, bool, str, type(None)}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("changed_to", SWAPS)
def test_rewinding_one_optimizer(swap: str, changed_to: str) -> None:
    """Loading its own earlier state, from whichever mode, takes an optimizer back: views are still views."""
    model, optimizer = trained()
    SWAPS[swap](optimizer)
    saved = everything(model, optimizer)
    optimizer.train()
    expected = losses(model, optimizer, LONG)
    addresses = [storages(optimizer.state[p]["momentum"]) for p in model.parameters()]
    SWAPS[changed_to](optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert differences(everything(model, optimizer), saved) == []
    assert [storages(optimizer.state[p]["momentum"]) for p in model.parameters()] == addresses
    assert storages(optimizer.state[model[5].weight]["momentum"]) == storages(
        optimizer.state[model[7].weight]["momentum"]
    )
    optimizer.train()
    assert losses(model, optimizer, LONG) == expected


# Dtypes


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_loading_across_dtypes(source: torch.dtype, target: torch.dtype, mode: bool) -> None:
    """State takes the dtype that belongs to the model at hand, with the file's values; training goes on, and back."""
    model, optimizer = trained(dtype=source)
    optimizer.train(mode)
    other = network(target, seed=1)
    restored = optimizer_of(other)
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(filed(optimizer.state_dict()))
    precision = torch.float64 if target == torch.float64 else torch.float32
    for parameter, of in zip(model.parameters(), other.parameters()):
        for key, value in restored.state[of].items():
            if isinstance(value, Tensor):
                assert value.dtype == precision
            if key in optimizer.state[parameter] and key != "weights":
                loaded, source_value = torch.as_tensor(value), torch.as_tensor(optimizer.state[parameter][key])
                assert torch.equal(loaded, source_value.to(loaded.dtype))
    restored.train()
    assert torch.tensor(losses(other, restored, LONG)).isfinite().all()
    assert {parameter.dtype for parameter in other.parameters()} == {target}
    back = network(source)
    again = optimizer_of(back)
    back.load_state_dict(other.state_dict())
    again.load_state_dict(filed(restored.state_dict()))
    assert torch.tensor(losses(back, again, LONG)).isfinite().all()


def test_low_precision_weights_survive_a_round_trip() -> None:
    """The fp32 copy of bf16 weights comes back from the file, not from the rounded weights of the model."""
    model, optimizer = trained(dtype=torch.bfloat16)
    resumed = network(torch.bfloat16, seed=1)
    restored = optimizer_of(resumed)
    restored.load_state_dict(filed(optimizer.state_dict()))
    resumed.load_state_dict(model.state_dict())
    for a, b in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(restored.state[b]["weights"], optimizer.state[a]["weights"])
        assert not torch.equal(restored.state[b]["weights"], b.float())


# What loading leaves alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("live_mode", [True, False])
@pytest.mark.parametrize("saved_mode", [True, False])
def test_loading_moves_no_weight(saved_mode: bool, live_mode: bool, dtype: torch.dtype) -> None:
    """The model's weights are the model's business, in every combination of modes; so is the file."""
    _, optimizer = trained(dtype=dtype)
    optimizer.train(saved_mode)
    state_dict = filed(optimizer.state_dict())
    pristine = copy.deepcopy(state_dict)
    model = network(dtype, seed=1)
    restored = optimizer_of(model).train(live_mode)
    before = copy.deepcopy(model.state_dict())
    restored.load_state_dict(state_dict)
    assert differences(model.state_dict(), before) == []
    assert differences(state_dict, pristine) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_parameters_keep_their_weights_through_a_load_in_eval_mode(dtype: torch.dtype) -> None:
    """Those that never trained too: the loaded state has the entries of the saved one, and training begins from it."""
    parameter = nn.Parameter(draws(1, 4, 4, dtype=dtype)[0], requires_grad=False)
    optimizer = SPlus([parameter])
    before = parameter.clone()
    saved = copy.deepcopy(optimizer.eval().state_dict())
    parameter.data.zero_()
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"][0].keys() == saved["state"][0].keys()
    optimizer.train()
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [True, False])
def test_loaded_state_is_not_shared(mode: bool, dtype: torch.dtype) -> None:
    """Two optimizers in one process share no memory after a load; training one leaves the other alone."""
    model, optimizer = trained(dtype=dtype)
    optimizer.train(mode)
    other = network(dtype)
    restored = optimizer_of(other)
    restored.load_state_dict(optimizer.state_dict())
    assert storages(restored.state_dict()["state"]).isdisjoint(storages(optimizer.state_dict()["state"]))
    before = everything(model, optimizer)
    restored.train()
    losses(other, restored, LONG)
    assert differences(everything(model, optimizer), before) == []


def test_loaded_hyperparameters_are_not_shared() -> None:
    """Nor do they share a learning rate that is a tensor, or the options of a group that are lists."""
    _, optimizer = trained("groups", lr=torch.tensor(0.1))
    restored = optimizer_of(network(), "groups", lr=torch.tensor(0.3))
    restored.load_state_dict(optimizer.state_dict())
    restored.param_groups[0]["lr"].fill_(0.7)
    rates = [group["lr"].item() for group in optimizer.param_groups]
    assert rates == pytest.approx([0.1] * len(rates))
    for loaded, source in zip(restored.param_groups, optimizer.param_groups):
        mutable = [key for key in source if isinstance(source[key], (list, Tensor))]
        assert [key for key in mutable if loaded[key] is source[key]] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_loaded_after_the_optimizer_was_made(dtype: torch.dtype) -> None:
    """A model that gets its weights after the optimizer was made keeps them through eval(), frozen ones included."""
    model = network(dtype)
    optimizer = optimizer_of(model)
    model.load_state_dict(network(dtype, seed=1).state_dict())
    weights = copy.deepcopy(model.state_dict())
    optimizer.eval()
    assert differences(model.state_dict(), weights) == []
    optimizer.train()
    model[3].requires_grad_(False)
    losses(model, optimizer, SHORT)
    for mode in (True, False, True):
        optimizer.train(mode)
        assert differences(model[3].weight.detach(), weights["3.weight"]) == []
        assert differences(model[3].bias.detach(), weights["3.bias"]) == []


# Hyperparameters


@pytest.mark.parametrize(
    ("name", "in_file", "live"),
    [
        *(("lr", 0.05, 0.3), ("betas", (0.8, 0.9), (0.5, 0.99)), ("eps", 1e-6, 1e-3), ("weight_decay", 0.1, 3.0)),
        *(("ema_decay", 0.8, 0.99), ("precondition_frequency", 2, 5), ("elementwise_scale", 0.01, 0.1)),
        *(("refresh_method", "eigh", "qr"), ("refresh_growth", None, 2.0), ("spread_refreshes", False, True)),
        *(("maximize", True, False), ("precondition_frequency", 5, 2), ("spread_refreshes", True, False)),
    ],
)
def test_hyperparameters_come_from_the_file(name: str, in_file: Any, live: Any) -> None:
    """A run resumed with other arguments is the uninterrupted one: the file wins, as with Adam."""
    model, optimizer = trained(**{name: in_file})
    resumed = network(seed=1)
    restored = optimizer_of(resumed, **{name: live})
    resumed.load_state_dict(filed(model.state_dict()))
    restored.load_state_dict(filed(optimizer.state_dict()))
    assert restored.param_groups[0][name] == in_file
    assert losses(resumed, restored, range(8, 40)) == losses(model, optimizer, range(8, 40))


@pytest.mark.parametrize("copied", ["load_state_dict", "deepcopy"])
def test_refresh_period_changed_in_training(copied: str) -> None:
    """A period that is changed on the group goes on the same way in a resumed run and in a copy."""
    model, optimizer = trained(precondition_frequency=3)
    optimizer.param_groups[0]["precondition_frequency"] = 7
    if copied == "deepcopy":
        resumed, restored = copy.deepcopy((model, optimizer))
    else:
        resumed = network(seed=1)
        restored = optimizer_of(resumed)
        resumed.load_state_dict(model.state_dict())
        restored.load_state_dict(optimizer.state_dict())
    assert losses(resumed, restored, range(8, 50)) == losses(model, optimizer, range(8, 50))


def test_learning_rate_set_after_loading() -> None:
    """After a load, as with Adam, a rate set on the groups or by a new scheduler is the one in use."""
    model, optimizer = trained(lr=0.1, weight_decay=0.0)
    resumed = network(seed=1)
    restored = optimizer_of(resumed, lr=0.3)
    resumed.load_state_dict(model.state_dict())
    restored.load_state_dict(optimizer.state_dict())
    restored.param_groups[0]["lr"] = 0.4
    torch.optim.lr_scheduler.LambdaLR(restored, lambda step: 0.5)
    before = copy.deepcopy(model.state_dict())
    losses(model, optimizer, LONG[:1])
    losses(resumed, restored, LONG[:1])
    for name, weights in before.items():
        torch.testing.assert_close(resumed.get_parameter(name) - weights, 2 * (model.get_parameter(name) - weights))


@pytest.mark.parametrize("scheduled", ["saved", "loaded", "both"])
def test_scheduler_on_one_side_of_a_load(scheduled: str) -> None:
    """A file saved with or without a scheduler loads into an optimizer with or without one, as with Adam."""

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=20)

    model, optimizer = network(), optimizer_of(network())
    resumed = optimizer_of(model)
    if scheduled != "loaded":
        scheduler(optimizer)
    if scheduled != "saved":
        scheduler(resumed)
    resumed.load_state_dict(filed(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    losses(model, resumed, LONG[:2])


def test_keys_that_users_add_to_groups() -> None:
    """A key of the user's own goes through the file, and a file without it loads."""
    model, optimizer = trained()
    bare = filed(optimizer.state_dict())
    optimizer.param_groups[0]["lr_scale"] = 0.5
    restored = optimizer_of(model)
    restored.load_state_dict(filed(optimizer.state_dict()))
    assert restored.param_groups[0]["lr_scale"] == 0.5
    restored.load_state_dict(bare)
    losses(model, restored, LONG[:1])


def test_step_numbers_may_be_tensors() -> None:
    """Tools that make tensors of numbers in a state dict do no harm; the state has plain numbers again."""
    _, optimizer = trained()
    state_dict = filed(optimizer.state_dict())
    for state in state_dict["state"].values():
        state["step"] = torch.tensor(float(state["step"]))
    restored = optimizer_of(network())
    restored.load_state_dict(state_dict)
    assert differences(restored.state_dict(), optimizer.state_dict()) == []


# Parameters without a gradient


class ThreeLayers(nn.Module):
    """One layer that trains throughout, one that is not used at first, one that is frozen later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(18, 18) for name in ("normal", "unused", "frozen")})
        self.uses_all = False
        for i, parameter in enumerate(self.parameters()):
            parameter.data.copy_(0.2 * draws(1, *parameter.shape, seed=i)[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers["frozen"](x.flatten(1)).tanh()
        if self.uses_all:
            x = self.layers["unused"](x).tanh()
        return self.layers["normal"](x)[:, :3]


@pytest.mark.parametrize("mode", [True, False])
def test_frozen_and_unused_parameters(mode: bool) -> None:
    """They keep their state, load, and train on as in the uninterrupted run once they have gradients again."""

    def make() -> tuple[ThreeLayers, SPlus]:
        model = ThreeLayers()
        return model, optimizer_of(model)

    model, optimizer = make()
    losses(model, optimizer, SHORT)
    model.layers["frozen"].requires_grad_(False)
    losses(model, optimizer, SHORT)
    steps = {name: optimizer.state[layer.weight]["step"] for name, layer in model.layers.items()}
    assert steps == {"normal": 16, "unused": 0, "frozen": 8}
    optimizer.train(mode)
    resumed, restored = make()
    resumed.layers["frozen"].requires_grad_(False)
    resumed.load_state_dict(filed(model.state_dict()))
    restored.load_state_dict(filed(optimizer.state_dict()))
    assert differences(restored.state_dict(), optimizer.state_dict()) == []
    runs = []
    for of, by in ((model, optimizer), (resumed, restored)):
        by.train()
        of.requires_grad_(True)
        of.uses_all = True
        runs.append(losses(of, by, LONG))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("saved_in", [True, False])
@pytest.mark.parametrize("added_in", [True, False])
def test_group_added_late_resumes_with_all_groups(added_in: bool, saved_in: bool, named: bool) -> None:
    """A run that got a group on the way goes on in an optimizer made with both; adding that again is an error."""

    def make() -> tuple[nn.Module, list[Any]]:
        model = network()
        return model, list(model.named_parameters() if named else model.parameters())

    model, parameters = make()
    optimizer = SPlus([{"params": parameters[:4], "lr": 0.1}], **BASE)
    losses(model, optimizer, SHORT)
    optimizer.train(added_in).add_param_group({"params": parameters[4:], "lr": 0.05})
    losses(model, optimizer.train(), LONG)
    optimizer.train(saved_in)
    resumed, parameters = make()
    restored = SPlus([{"params": parameters[:4]}, {"params": parameters[4:], "lr": 0.3}], **BASE)
    resumed.load_state_dict(model.state_dict())
    restored.load_state_dict(filed(optimizer.state_dict()))
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.05]
    with pytest.raises(ValueError, match="more than one parameter group"):
        restored.add_param_group({"params": parameters[4:]})
    assert losses(resumed, restored.train(), LONG) == losses(model, optimizer.train(), LONG)


def test_groups_of_two_modes_are_refused() -> None:
    """A file put together from groups in eval mode and in train mode has no weights for some of them."""

    def make() -> SPlus:
        return SPlus([{"params": [parameter]} for parameter in network().parameters()], **BASE)

    optimizer, state_dict = make(), make().state_dict()
    before = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][3]["training"] = False
    with pytest.raises(ValueError, match=r"training=\[True, True, True, False"):
        optimizer.load_state_dict(state_dict)
    assert differences(optimizer.state_dict(), before) == []


# Files of something else


def without(container: dict[str, Any] | list[Any], key: Any) -> None:
    del container[key]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another optimizer's": (lambda sd: torch.optim.Adam(network().parameters()).state_dict(), "ema_decay"),
    "a model's": (lambda sd: dict(network().state_dict()), "param_groups"),
    "empty": (lambda sd: {}, "param_groups"),
    "no state": (lambda sd: without(sd, "state"), "state"),
    "a group without parameters": (lambda sd: sd["param_groups"][0].pop("params") and None, "no 'params'"),
    "more groups": (lambda sd: sd["param_groups"].append(sd["param_groups"][0]), "2 parameter groups"),
    "fewer parameters": (lambda sd: optimizer_of(network()[:-1]).state_dict(), "6 parameters"),
    "a hyperparameter is missing": (
        lambda sd: without(sd["param_groups"][0], "elementwise_scale"),
        "elementwise_scale",
    ),
    "a hyperparameter is out of range": (lambda sd: sd["param_groups"][0].update(lr=-1.0), "lr.*-1.0"),
    "a hyperparameter is no number": (lambda sd: sd["param_groups"][0].update(ema_decay="much"), "ema_decay"),
    "state of a parameter is missing": (lambda sd: without(sd["state"], 7), r"7 .*shape \(3,\)"),
    "an entry is missing": (lambda sd: without(sd["state"][7], "momentum"), r"7 .*shape \(3,\).*momentum"),
    "an entry is unknown": (lambda sd: sd["state"][7].update(exp_avg=torch.zeros(3)), "7 .*exp_avg"),
    "another shape": (lambda sd: sd["state"][7].update(momentum=torch.zeros(4)), r"momentum of .*7 .*\(4,\).*\(3,\)"),
    "a number for a tensor": (lambda sd: sd["state"][7].update(momentum=0.0), "momentum of .*7 "),
    "no number for the steps": (lambda sd: sd["state"][7].update(step="many"), "step of .*7 "),
    "a size that is not finite": (lambda sd: sd["state"][0].update(peak=float("nan")), "peak of .*nan"),
    "eval mode, without the weights": (lambda sd: sd["param_groups"][0].update(training=False), "weights"),
    "limit": (lambda sd: optimizer_of(network(), max_preconditioner_dim=5).state_dict(), "max_preconditioner_dim=5"),
    "whiten": (lambda sd: optimizer_of(network(), whiten="2d").state_dict(), "whiten='2d'"),
    "oversized": (lambda sd: optimizer_of(network(), oversized="unrotated").state_dict(), "oversized='unrotated'"),
    "split": (lambda sd: sd["param_groups"][0].update(split=2), "split=2"),
    "split_dim": (lambda sd: sd["param_groups"][0].update(split_dim=1), "split_dim=1"),
    "stacked": (lambda sd: sd["param_groups"][0].update(stacked=True), "stacked=True"),
}


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_state_dict_is_refused_and_changes_nothing(wrong: str, mode: bool) -> None:
    """A partial or foreign state dict is a ValueError that names what is wrong; nothing has been loaded then."""
    change, message = WRONG[wrong]
    state_dict = filed(optimizer_of(network()).state_dict())
    changed = change(state_dict)
    model, optimizer = trained()
    optimizer.train(mode)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict if changed is None else changed)
    assert differences(everything(model, optimizer), before) == []
    assert optimizer.training == mode
    optimizer.train()
    untouched, reference = trained()
    assert losses(model, optimizer, LONG[:3]) == losses(untouched, reference, LONG[:3])


def test_averaged_weights_of_another_shape_are_refused() -> None:
    """In eval mode the weights are in the file; they too have to fit."""
    model, optimizer = trained()
    state_dict = filed(optimizer_of(network()).eval().state_dict())
    state_dict["state"][7]["weights"] = torch.zeros(4)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=r"weights of .*7 .*\(4,\).*\(3,\)"):
        optimizer.load_state_dict(state_dict)
    assert differences(everything(model, optimizer), before) == []


def test_another_head_is_named_with_both_shapes() -> None:
    """A checkpoint of a model with another number of classes: the error has the parameter and both shapes."""
    model, other = nn.Linear(4, 10), nn.Linear(4, 20)
    optimizer = SPlus(model.named_parameters())
    with pytest.raises(ValueError, match=r"'weight'.*\(20, 4\).*\(10, 4\)"):
        optimizer.load_state_dict(SPlus(other.named_parameters()).state_dict())


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("kind", ["default", "groups"])
def test_new_head_starts_afresh_as_documented(kind: str, mode: bool) -> None:
    """The recipe of load_state_dict: what fits the file comes from it, a new head is as new, and both train on."""
    recipe = textwrap.dedent((inspect.getdoc(SPlus.load_state_dict) or "").split("::\n")[1].split("Raises:")[0])
    model, source = trained(kind)
    resumed = network(seed=1)
    resumed[9] = nn.Linear(6, 5)
    optimizer = optimizer_of(resumed, kind).train(mode)
    new = copy.deepcopy([optimizer.state[p] for p in resumed[9].parameters()])
    saved = filed(source.train(mode).state_dict())
    exec(recipe, {"optimizer": optimizer, "saved": saved})
    for old, of in zip(model[:9].parameters(), resumed[:9].parameters()):
        assert differences(optimizer.state[of], source.state[old]) == []
    assert differences([optimizer.state[p] for p in resumed[9].parameters()], new) == []
    resumed(draws(4, 2, 3, 3, dtype=torch.float32)).square().mean().backward()
    optimizer.train().step()
    assert [optimizer.state[resumed[i].weight]["step"] for i in (7, 9)] == [9, 1]


# Names


def pair(names: str, options: dict[str, Any] | None = None) -> tuple[dict[str, nn.Parameter], SPlus]:
    """Parameters of these one-letter names in this order; a letter's values do not depend on its place."""
    parameters = {name: nn.Parameter(draws(1, 4, 4, seed=ord(name))[0]) for name in names}
    return parameters, SPlus([{"params": list(parameters.items()), **(options or {})}], **BASE, spread_refreshes=False)


def test_names_of_other_groups_are_refused() -> None:
    """A group with more names than parameters, as regrouping a flattened file leaves it, is an error that says so."""
    _, optimizer = pair("ab")
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["param_names"] = ["a", "b", "c"]
    with pytest.raises(ValueError, match="2 parameters and 3 names"):
        optimizer.load_state_dict(state_dict)


def descend(parameters: dict[str, nn.Parameter], optimizer: SPlus, steps: int) -> None:
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = draws(1, *parameter.shape, seed=1000 * step + ord(name))[0]
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"split": [2, None, None]}])
def test_reordered_parameters_match_by_name(options: dict[str, Any]) -> None:
    """A model that declares its layers in another order gets each its own state, and trains on as before."""
    original, optimizer = pair("abc", options)
    descend(original, optimizer, 6)
    reordered, restored = pair("cba", {option: value[::-1] for option, value in options.items()})
    for name, parameter in reordered.items():
        parameter.data.copy_(original[name].data)
    restored.load_state_dict(filed(optimizer.state_dict()))
    for name in "abc":
        assert differences(restored.state[reordered[name]], optimizer.state[original[name]]) == []
    assert restored.param_groups[0]["param_names"] == list("cba")
    descend(original, optimizer, 6)
    descend(reordered, restored, 6)
    assert all(torch.equal(original[name], reordered[name]) for name in "abc")


def test_other_names_are_refused() -> None:
    """Parameters of other names are not taken for those of the file by their position."""
    parameters, optimizer = pair("ab")
    descend(parameters, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"'b'.*'a', 'c'"):
        optimizer.load_state_dict(pair("ac")[1].state_dict())
    assert differences(optimizer.state_dict(), before) == []


@pytest.mark.parametrize("named", ["file", "live"])
def test_names_on_one_side_match_by_position(named: str) -> None:
    """Where only one side has names there is nothing to match but the position, as with Adam."""
    with_names, named_optimizer = pair("ab")
    plain = SPlus([nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)) for _ in "ab"], **BASE, spread_refreshes=False)
    descend(with_names, named_optimizer, 3)
    for parameter in plain.param_groups[0]["params"]:
        parameter.grad = draws(1, 4, 4, seed=5)[0]
    plain.step()
    source, target = (named_optimizer, plain) if named == "file" else (plain, named_optimizer)
    target.load_state_dict(filed(source.state_dict()))
    assert differences(target.state_dict()["state"], source.state_dict()["state"]) == []
    assert target.param_groups[0]["param_names"] == ["a", "b"]


# Hooks


def test_load_hooks_run() -> None:
    """A pre hook may change the state dict in place or return another; the post hook sees the loaded optimizer."""
    _, optimizer = trained()
    restored = optimizer_of(network())
    calls: list[str] = []

    def rename(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        calls.append("in place")
        state_dict["param_groups"] = copy.deepcopy(state_dict["param_groups"])
        state_dict["param_groups"][0]["lr"] = 0.25

    def replace(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("another")
        return copy.deepcopy(state_dict)

    def after(loaded: torch.optim.Optimizer) -> None:
        calls.append(f"lr {loaded.param_groups[0]['lr']}")

    restored.register_load_state_dict_pre_hook(replace)
    restored.register_load_state_dict_pre_hook(rename, prepend=True)
    handle = restored.register_load_state_dict_post_hook(after)
    restored.load_state_dict(optimizer.state_dict())
    assert calls == ["in place", "another", "lr 0.25"]
    assert optimizer.param_groups[0]["lr"] == 0.1
    handle.remove()
    restored.load_state_dict(optimizer.state_dict())
    assert calls[3:] == ["in place", "another"]


def test_state_dict_hooks_run() -> None:
    """Hooks before and after state_dict(): the first sees the optimizer, the second may change what is returned."""
    optimizer = optimizer_of(network())
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(seen.append)
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "note": 1})
    assert optimizer.state_dict()["note"] == 1
    assert seen == [optimizer]


# Copies

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("steps", [0, 8])
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("default", torch.bfloat16)])
def test_copies_train_identically_and_apart(kind: str, dtype: torch.dtype, copied: str, steps: int, swap: str) -> None:
    """A copy, before any step or later, in either mode, is the same optimizer; then each goes its own way."""
    model = network(dtype)
    optimizer = optimizer_of(model, kind)
    losses(model, optimizer, range(steps))
    SWAPS[swap](optimizer)
    twin, double = COPIES[copied]((model, optimizer))
    assert isinstance(double, SPlus)
    assert double.training == optimizer.training
    assert {key: double.defaults[key] for key in optimizer.defaults} == optimizer.defaults
    assert differences(everything(twin, double), everything(model, optimizer)) == []
    before = everything(model, optimizer)
    ahead = losses(twin, double.train(), LONG)
    assert differences(everything(model, optimizer), before) == []
    assert losses(model, optimizer.train(), LONG) == ahead
    assert differences(everything(twin, double.eval()), everything(model, optimizer.eval())) == []


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("copied", COPIES)
def test_group_added_to_a_copy(copied: str, mode: bool) -> None:
    """A copy of an optimizer in which some parameter never had a gradient takes a new group, and steps and swaps."""
    model = ThreeLayers()
    optimizer = optimizer_of(model)
    losses(model, optimizer, SHORT)
    optimizer.train(mode)
    twin, double = COPIES[copied]((model, optimizer))
    runs: list[Any] = []
    optimizers = [optimizer, double]
    for of, by in ((model, optimizer), (twin, double)):
        late = nn.Parameter(draws(1, 6, 6, dtype=torch.float32)[0])
        by.add_param_group({"params": [late], "lr": 0.01})
        assert by.param_groups[1]["ema_decay"] == BASE["ema_decay"]
        assert by.param_groups[1]["training"] == mode
        by.train()
        by.zero_grad()
        late.grad = draws(1, 6, 6, seed=1, dtype=torch.float32)[0]
        by.step()
        of.uses_all = True
        runs.append((losses(of, by, LONG), copy.deepcopy([by.state[p] for p in (*of.parameters(), late)])))
        weights = late.detach().clone()
        runs[-1] += (weights, everything(of, by.eval())[0], late.detach().clone())
        assert torch.equal(late, by.state[late]["average"])
        by.train()
        assert torch.equal(late, weights)
        assert differences(by.state_dict()["state"], copy.deepcopy(by).state_dict()["state"]) == []
    assert differences(runs[0], runs[1]) == []
    optimizers[1].load_state_dict(filed(optimizers[0].state_dict()))
