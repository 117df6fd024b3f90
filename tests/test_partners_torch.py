"""Other parts of torch that look at weights: BatchNorm, torch.compile, functional calls, averages, flat partitions."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from partners import loss_of, network, optimizer_of
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from splus import SPlus

INPUTS = torch.randn(12, 16, 5, generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor = INPUTS) -> None:
    for x in batches:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


def bits(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_batch_statistics_of_a_copy_with_the_averages() -> None:
    """A copy whose statistics are collected anew is judged better, and the model trains on as if nothing had been."""
    runs = []
    for judges in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = SPlus(model.named_parameters(), lr=0.3, ema_decay=0.9)
        train(model, optimizer)
        if judges:
            with optimizer.averaged():
                copied = copy.deepcopy(model)
                stale = loss_of(copy.deepcopy(model).eval(), INPUTS.flatten(0, 1))
            assert torch.equal(copied[0].weight, optimizer.state[model[0].weight]["average"])
            update_bn(INPUTS, copied)
            assert loss_of(copied.eval(), INPUTS.flatten(0, 1)) < stale
        train(model, optimizer)
        runs.append(bits(model))
    assert same(*runs)


def test_compiled_model_follows_the_switch() -> None:
    """What torch.compile made before the steps computes with the weights that are in the model now."""
    model = network()
    compiled = torch.compile(model, backend="eager")
    optimizer = optimizer_of(compiled, weight_decay=0.0)
    train(compiled, optimizer)
    outputs = []
    with torch.no_grad():
        for switch in (optimizer.eval, optimizer.train):
            switch()
            fresh = network()
            fresh.load_state_dict(model.state_dict())
            outputs.append(compiled(INPUTS[0]))
            assert torch.equal(outputs[-1], fresh(INPUTS[0]))
    assert not torch.equal(*outputs)


def test_gradients_of_functional_calls() -> None:
    """torch.func's gradients, put into .grad, train as those of backward do."""
    model, functional = network(), network()
    train(model, optimizer_of(model, weight_decay=0.0))
    optimizer = optimizer_of(functional, weight_decay=0.0)
    for x in INPUTS:
        parameters = {name: parameter.detach() for name, parameter in functional.named_parameters()}
        gradient = torch.func.grad(lambda at, x=x: loss_of(lambda x: functional_call(functional, at, (x,)), x))
        for name, value in gradient(parameters).items():
            functional.get_parameter(name).grad = value
        optimizer.step()
    assert same(bits(functional), bits(model))


def test_parametrized_weights_follow_the_switch() -> None:
    """A weight that is computed from parameters is computed from their averages in eval mode."""
    model = network()
    parametrizations.weight_norm(model[0])
    optimizer = optimizer_of(model, weight_decay=0.0)
    train(model, optimizer)
    original = model[0].parametrizations.weight
    for switch in (optimizer.eval, optimizer.train):
        switch()
        g, v = original.original0, original.original1
        torch.testing.assert_close(model[0].weight, g * v / v.norm(dim=1, keepdim=True))
        assert torch.equal(v, optimizer.state[v]["average"]) == (not optimizer.training)


def test_tied_weights_switch_once() -> None:
    """A weight with two names is one parameter in both modes."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    optimizer = optimizer_of(model, weight_decay=0.0)
    train(model, optimizer)
    raw = model[0].weight.detach().clone()
    with optimizer.averaged():
        assert model[2].weight is model[0].weight
        assert torch.equal(model[2].weight, optimizer.state[model[0].weight]["average"])
    assert torch.equal(model[2].weight, raw)


def test_averaged_model_beside_the_optimizers_own() -> None:
    """AveragedModel, fed in train mode, is an average of the raw weights of its own, and does not disturb the run."""
    model, plain = network(), network()
    other = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = optimizer_of(model, weight_decay=0.0)
    expected: list[Tensor] = []
    for x in INPUTS:
        train(model, optimizer, x[None])
        other.update_parameters(model)
        with optimizer.averaged():
            pass
        news = [parameter.detach().clone() for parameter in model.parameters()]
        expected = [old.lerp(new, 1 - 0.8) for old, new in zip(expected, news)] if expected else news
    torch.testing.assert_close([p.detach() for p in other.module.parameters()], expected)
    train(plain, optimizer_of(plain, weight_decay=0.0))
    assert same(bits(model), bits(plain))


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_zero_redundancy_optimizer_on_one_process() -> None:
    """It takes whole parameters, trains as the optimizer it wraps, and has the switch in .optim."""
    model, plain = network(), network()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=SPlus, lr=0.3, ema_decay=0.8, weight_decay=0.0
    )
    train(model, sharded)
    optimizer = optimizer_of(plain, weight_decay=0.0)
    train(plain, optimizer)
    assert same(bits(model), bits(plain))
    with sharded.optim.averaged(), optimizer.averaged():
        assert same(bits(model), bits(plain))
    train(model, sharded)
    train(plain, optimizer)
    assert same(bits(model), bits(plain))


def partition(optimizer: SPlus) -> None:
    """What ZeRO of DeepSpeed does to an optimizer: each group holds one flat copy of its parameters instead."""
    for group in optimizer.param_groups:
        flat = torch.cat([parameter.detach().flatten() for parameter in group["params"]])
        group["params"] = [nn.Parameter(flat)]


def test_flat_partitions_are_refused() -> None:
    """A matrix whose shape is lost cannot be whitened, and says so instead of taking the elementwise rule."""
    model = network()
    optimizer = optimizer_of(model, weight_decay=0.0)
    partition(optimizer)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    with pytest.raises(RuntimeError, match=r"flat vector of 57 entries.*'0.weight'"):
        optimizer.step()


def test_flat_partitions_of_what_is_not_whitened() -> None:
    """A group of vectors alone loses nothing, and trains flattened as it does apart."""
    apart = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(4))]
    optimizer = SPlus(apart, lr=0.1)
    partition(optimizer)
    (flat,) = optimizer.param_groups[0]["params"]
    flat.grad = torch.ones(7)
    for parameter in apart:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    SPlus(apart, lr=0.1).step()
    assert torch.equal(flat, torch.cat([parameter.detach() for parameter in apart]))


@pytest.mark.parametrize("taken_out", ["group", "matrix"])
def test_vector_that_is_left_over_is_no_partition(taken_out: str) -> None:
    """Where matrices are taken out by hand, a vector of the optimizer's own that stays alone goes on."""
    model = network()
    matrix, vector = model[0].weight, model[0].bias
    if taken_out == "group":
        optimizer = SPlus([{"params": [matrix]}, {"params": [vector]}])
        del optimizer.param_groups[0]
    else:
        optimizer = SPlus([matrix, vector])
        del optimizer.param_groups[0]["params"][0]
    before = vector.detach().clone()
    vector.grad = torch.ones_like(vector)
    optimizer.step()
    assert not torch.equal(vector, before)


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP")
@pytest.mark.parametrize(("original", "entries"), [(False, 57), (True, 40)])
def test_flat_parameters_of_fsdp_are_refused(original: bool, entries: int) -> None:
    """The first FSDP has flat parameters; on several ranks the original ones are flat pieces of them."""
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=original)
    with pytest.raises(ValueError, match=rf"{entries} entries.*fully_shard"):
        SPlus(model.parameters())


def test_mode_is_visible_through_every_wrapper() -> None:
    """A wrapper that swallows eval() is found out: training, the groups and the printed optimizer tell the mode."""
    model = network()
    optimizer = optimizer_of(model, weight_decay=0.0)
    train(model, optimizer)
    assert optimizer.training
    assert all(group["training"] for group in optimizer.param_groups)
    assert "training: True" in repr(optimizer)
    optimizer.eval()
    assert not optimizer.training
    assert not any(group["training"] for group in optimizer.param_groups)
    assert "training: False" in repr(optimizer)
    assert not any(group["training"] for group in optimizer.state_dict()["param_groups"])
