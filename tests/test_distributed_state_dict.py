"""torch.distributed.checkpoint on one process: state goes by qualified names, whatever the order, groups and mode."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import draws
from test_state_dict import (
    BASE,
    KINDS,
    LONG,
    SHORT,
    ThreeLayers,
    differences,
    everything,
    filed,
    losses,
    network,
    optimizer_of,
    trained,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from splus import SPlus

NESTED, FLAT = StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)
OPTIONS = {"nested": NESTED, "flat": FLAT, "full": StateDictOptions(full_state_dict=True, cpu_offload=True)}
every_form = pytest.mark.parametrize("form", OPTIONS)
every_mode = pytest.mark.parametrize("mode", [True, False])


def through_dcp(
    model: nn.Module, optimizer: SPlus, resumed: nn.Module, restored: SPlus, options: StateDictOptions
) -> None:
    state_dict = filed(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(resumed, restored, state_dict, options=options)


@every_form
@every_mode
@pytest.mark.parametrize("kind", KINDS)
def test_distributed_state_dict(kind: str, mode: bool, form: str) -> None:
    """Saved and set with qualified names, in each form, in either mode: the run goes on as uninterrupted."""
    model, optimizer = trained(kind)
    optimizer.train(mode)
    resumed = network(seed=1)
    restored = optimizer_of(resumed, kind)
    if form == "flat":
        restored.train(mode)
    resumed.load_state_dict(model.state_dict())
    weights = copy.deepcopy(resumed.state_dict())
    through_dcp(model, optimizer, resumed, restored, OPTIONS[form])
    assert differences(resumed.state_dict(), weights) == []
    assert differences(restored.state_dict()["state"], optimizer.state_dict()["state"]) == []
    assert restored.training == mode
    assert losses(resumed, restored.train(), LONG) == losses(model, optimizer.train(), LONG)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [NESTED, FLAT])
@pytest.mark.parametrize("kind", [*KINDS, "bf16 bases"])
def test_checkpoint_directory(kind: str, options: StateDictOptions, tmp_path: Path) -> None:
    """torch.distributed.checkpoint writes and reads the state, numbers and options included, without processes."""
    extra: dict[str, Any] = {} if kind in KINDS else {"matmul_dtype": torch.bfloat16}
    kind = kind if kind in KINDS else "default"
    model, optimizer = trained(kind, lr=0.2, **extra)
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    resumed = network(seed=1)
    restored = optimizer_of(resumed, kind, **extra)
    resumed.load_state_dict(model.state_dict())
    read = {"optimizer": get_optimizer_state_dict(resumed, restored, options=options)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(resumed, restored, read["optimizer"], options=options)
    assert restored.param_groups[0]["lr"] == 0.2
    assert losses(resumed, restored, LONG) == losses(model, optimizer, LONG)


# Modes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_state_dict_of_train_mode_loads_in_eval_mode(dtype: torch.dtype) -> None:
    """torch asks a flat file for the entries of the state at hand; the weights that it has not got are not needed."""
    model, optimizer = trained(dtype=dtype)
    resumed = network(dtype, seed=1)
    restored = optimizer_of(resumed).eval()
    resumed.load_state_dict(model.state_dict())
    through_dcp(model, optimizer, resumed, restored, FLAT)
    assert restored.training
    assert differences(restored.state_dict()["state"], optimizer.state_dict()["state"]) == []
    assert losses(resumed, restored, LONG) == losses(model, optimizer, LONG)


def test_flat_state_dict_of_eval_mode_needs_eval_mode() -> None:
    """In train mode torch would leave out the weights that are trained: an error says so, and nothing has changed."""
    model, optimizer = trained()
    optimizer.eval()
    resumed = network(seed=1)
    restored = optimizer_of(resumed)
    before = everything(resumed, restored)
    with pytest.raises(ValueError, match=r"eval mode and has no weights of .*eval\(\) before loading"):
        through_dcp(model, optimizer, resumed, restored, FLAT)
    assert differences(everything(resumed, restored), before) == []
    through_dcp(model, optimizer, resumed, restored.eval(), FLAT)
    resumed.load_state_dict(model.state_dict())
    assert losses(resumed, restored.train(), LONG) == losses(model, optimizer.train(), LONG)


# Frozen parameters


@every_form
@every_mode
def test_distributed_state_dict_of_frozen_parameters(mode: bool, form: str) -> None:
    """torch leaves out the state of what is frozen at the time of loading; the rest loads, and that stays as it is."""
    model, resumed = ThreeLayers(), ThreeLayers()
    optimizer, restored = optimizer_of(model), optimizer_of(resumed)
    losses(model, optimizer, SHORT)
    resumed.layers["frozen"].requires_grad_(False)
    through_dcp(model, optimizer.train(mode), resumed, restored.train(mode), OPTIONS[form])
    for by in (optimizer, restored):
        by.train()
    for name, layer in resumed.layers.items():
        source = optimizer.state[model.layers[name].weight]
        assert (differences(restored.state[layer.weight], source) == []) == (name != "frozen")
    assert restored.state[resumed.layers["frozen"].weight]["step"] == 0


@every_form
@pytest.mark.parametrize("live_mode", [True, False])
@pytest.mark.parametrize("saved_mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_first", [True, False])
def test_frozen_parameters_keep_the_weights_of_the_model(
    model_first: bool, dtype: torch.dtype, saved_mode: bool, live_mode: bool, form: str
) -> None:
    """Without state in the file, a frozen layer's weights are the model's, through every swap from then on."""
    if form == "flat" and (saved_mode, live_mode) == (False, True):
        return
    model, resumed = ThreeLayers().to(dtype), ThreeLayers().to(dtype)
    model.layers["frozen"].requires_grad_(False)
    for parameter in resumed.parameters():
        parameter.data.neg_()
    optimizer, restored = optimizer_of(model), optimizer_of(resumed)
    losses(model, optimizer, SHORT)
    resumed.layers["frozen"].requires_grad_(False)
    restored.train(live_mode)
    optimizer.train(saved_mode)
    if model_first:
        resumed.load_state_dict(model.state_dict())
    through_dcp(model, optimizer, resumed, restored, OPTIONS[form])
    resumed.load_state_dict(model.state_dict())
    for mode in (True, False, True):
        optimizer.train(mode)
        restored.train(mode)
        assert differences(resumed.state_dict(), model.state_dict()) == []
    assert losses(resumed, restored, LONG) == losses(model, optimizer, LONG)
    resumed.requires_grad_(True)
    losses(resumed, restored, LONG[:2])
    assert copy.deepcopy(restored).eval().train().training


# Order and groups


class Reordered(nn.Module):
    """Square layers of these one-letter names, declared in this order and applied in that of the alphabet."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            layer = nn.Linear(6, 6, bias=False)
            layer.weight.data.copy_(0.4 * draws(1, 6, 6, seed=ord(name))[0])
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, layer in sorted(self.named_children()):
            x = layer(x).tanh()
        return x


def descend(model: nn.Module, optimizer: SPlus, steps: range) -> list[float]:
    values = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(draws(5, 6, seed=step, dtype=torch.float32)).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@every_form
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("split", [{"a": 2, "b": None, "c": 3}, None])
def test_reordered_parameters_match_by_qualified_name(split: dict[str, Any] | None, named: bool, form: str) -> None:
    """A model that declares its layers in another order gets each its own state, also where the optimizer has names."""

    def make(names: str) -> tuple[nn.Module, SPlus]:
        model = Reordered(names)
        parameters: Iterable[Any] = model.named_parameters() if named else model.parameters()
        sections = [split[name] for name in names] if split else None
        return model, SPlus([{"params": parameters, "split": sections}], **BASE, spread_refreshes=False)

    model, optimizer = make("abc")
    descend(model, optimizer, SHORT)
    resumed, restored = make("cab")
    resumed.load_state_dict(model.state_dict())
    if split and not named:
        with pytest.raises(ValueError, match="split"):
            through_dcp(model, optimizer, resumed, restored, OPTIONS[form])
        return
    through_dcp(model, optimizer, resumed, restored, OPTIONS[form])
    for name, parameter in resumed.named_parameters():
        assert differences(restored.state[parameter], optimizer.state[model.get_parameter(name)]) == []
    assert restored.param_groups[0].get("param_names") == (["c.weight", "a.weight", "b.weight"] if named else None)
    assert descend(resumed, restored, LONG) == descend(model, optimizer, LONG)


CUTS: dict[str, list[slice]] = {
    "one": [slice(0, 8)],
    "two": [slice(0, 3), slice(3, 8)],
    "other two": [slice(0, 5), slice(5, 8)],
    "three": [slice(0, 1), slice(1, 4), slice(4, 8)],
}


def grouped(model: nn.Module, cut: str, named: bool, **options: Any) -> SPlus:
    """Groups of the model's parameters, with learning rates of 0.1, 0.2 and 0.3."""
    parameters: list[Any] = list(model.named_parameters() if named else model.parameters())
    groups = [{"params": parameters[of], "lr": rate} for of, rate in zip(CUTS[cut], (0.1, 0.2, 0.3))]
    return SPlus(groups, **{**BASE, **options})


@every_mode
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("options", [NESTED, FLAT])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(CUTS, 2)))
def test_state_dict_loads_into_other_groups(
    before: str, after: str, options: StateDictOptions, named: bool, mode: bool
) -> None:
    """Step, mode, average and all come back for each parameter, however the same parameters are grouped."""
    model, resumed = network(), network(seed=1)
    optimizer, restored = grouped(model, before, named), grouped(resumed, after, named)
    losses(model, optimizer, SHORT)
    names = [group.get("param_names") for group in restored.param_groups]
    resumed.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The loaded state dict has no options for group")
        through_dcp(model, optimizer.train(mode), resumed, restored.train(mode), options)
    for name, parameter in resumed.named_parameters():
        assert differences(restored.state[parameter], optimizer.state[model.get_parameter(name)]) == []
    assert [group["training"] for group in restored.param_groups] == [mode] * len(CUTS[after])
    assert [group.get("param_names") for group in restored.param_groups] == names
    assert torch.tensor(losses(resumed, restored.train(), LONG)).isfinite().all()


def test_options_of_other_groups() -> None:
    """A flat file gives each group the options of its parameters; from a nested one a group may get none, and warns."""
    rates: dict[str, list[float]] = {}
    for form, options in (("flat", FLAT), ("nested", NESTED)):
        model = network()
        optimizer, restored = grouped(model, "two", False), grouped(model, "three", False, ema_decay=0.5)
        losses(model, optimizer, SHORT)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            through_dcp(model, optimizer, model, restored, options)
        said = [str(warning.message) for warning in caught if "no options" in str(warning.message)]
        assert len(said) == (0 if form == "flat" else 1)
        assert all("group 0" in message and "flatten_optimizer_state_dict" in message for message in said)
        rates[form] = [group["lr"] for group in restored.param_groups]
        assert restored.param_groups[0]["ema_decay"] == (0.9 if form == "flat" else 0.5)
    assert rates == {"flat": [0.1, 0.1, 0.2], "nested": [0.1, 0.1, 0.2]}


def test_names_of_the_file_stay_out_of_a_group_without_names() -> None:
    """Where the groups differ, those names would be other parameters'."""
    model = network()
    optimizer, restored = grouped(model, "two", True), grouped(model, "one", False)
    losses(model, optimizer, SHORT)
    through_dcp(model, optimizer, model, restored, NESTED)
    assert "param_names" not in restored.param_groups[0]


TIED: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "twice": lambda model: [{"params": list(model.named_parameters(remove_duplicate=False))}],
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@every_mode
@pytest.mark.parametrize("options", [None, NESTED, FLAT])
@pytest.mark.parametrize("given", TIED)
def test_tied_weights_are_saved_and_swapped_once(given: str, options: StateDictOptions | None, mode: bool) -> None:
    """A tensor with two names, listed once or twice, has one state through a file, and swaps back bit for bit."""

    def make() -> tuple[nn.Module, SPlus]:
        model = Reordered("abc")
        model.c.weight = model.a.weight
        return model, SPlus(TIED[given](model), **BASE)

    model, optimizer = make()
    descend(model, optimizer, SHORT)
    weights = copy.deepcopy(model.state_dict())
    assert differences(model.state_dict() if optimizer.eval() else None, weights) != []
    optimizer.train()
    assert differences(model.state_dict(), weights) == []
    optimizer.train(mode)
    resumed, restored = make()
    restored.train(mode)
    resumed.load_state_dict(model.state_dict())
    if options is None:
        restored.load_state_dict(filed(optimizer.state_dict()))
    else:
        through_dcp(model, optimizer, resumed, restored, options)
    assert len(restored.state) == 2
    assert descend(resumed, restored.train(), LONG) == descend(model, optimizer.train(), LONG)
