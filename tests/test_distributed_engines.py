"""Training under torch's own engines on real processes: what one process does with the whole batch, bit-equal ranks."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_distributed import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from splus import SPlus, param_groups

STEPS, BATCH, CLIP = 8, 24, 0.05
EXACT = {"rtol": 1e-7, "atol": 1e-9}  # fp64; another sign of an update would be a thousandth
OPTIONS: dict[str, Any] = {"lr": 0.3, "precondition_frequency": 4, "ema_decay": 0.8}

Weights = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, width: int, residual: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(torch.tanh(self.up(self.norm(x))))
        return x + out if self.residual else out


class Network(nn.Module):
    """Its matrices are square, so that their gradients have full rank; a batch may go past the optional layer.

    Seven rows on two to four ranks are uneven shards, and three rows of tokens leave a fourth rank none.
    """

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(3, width))
        self.embedding = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.optional = nn.Linear(width, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        x = self.embedding(x) * self.tokens.prod(0)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.optional(x) if use else x)


def network(dtype: torch.dtype = torch.float64, width: int = 7) -> Network:
    torch.manual_seed(1)
    return Network(width).to(dtype)


def share(step: int, rank: int = 0, ranks: int = 1, width: int = 7) -> tuple[Tensor, Tensor]:
    """A rank's part of the batch of a step."""
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x.chunk(ranks)[rank], torch.sin(3 * x.cumsum(1)).chunk(ranks)[rank]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, *use: bool) -> Tensor:
    return (model(x, *use) - y).square().mean()


# Whether a rank uses the optional layer in a step

Uses = Callable[[int, int], bool]


def always(step: int, rank: int) -> bool:
    return True


def but_for_rank_one(step: int, rank: int) -> bool:
    return not (rank == 1 and step % 2)


def now_and_then(step: int, rank: int) -> bool:
    return step % 3 != 1


def either(step: int, rank: int) -> bool:
    return now_and_then(step, rank) and but_for_rank_one(step, rank)


def optimizer_of(model: nn.Module, **options: Any) -> SPlus:
    return SPlus(param_groups(model), **OPTIONS | options)


def result(model: nn.Module, optimizer: SPlus) -> Weights:
    """The weights and their averages, whole."""
    found = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    with optimizer.averaged():
        return found | {f"{name}, averaged": whole(p.detach()).clone() for name, p in model.named_parameters()}


@cache
def alone(ranks: int = 1, uses: Uses = always, clip: float = 0, width: int = 7, first: int = 0) -> Weights:
    """One process, which goes through the shares of all ranks."""
    model = network(width=width)
    optimizer = optimizer_of(model)
    for step in range(first, first + STEPS):
        for rank in range(ranks):
            (loss_of(model, *share(step, rank, ranks, width), uses(step, rank)) / ranks).backward()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def assert_as_one(found: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor], **tolerance: float) -> None:
    for name, value in expected.items():
        for of_rank in found:
            assert torch.equal(of_rank[name], found[0][name]), f"{name} differs between ranks"
        torch.testing.assert_close(found[0][name], value, **tolerance or EXACT)


# DistributedDataParallel


def ddp(
    rank: int, ranks: int, uses: Uses, options: dict[str, Any], micro: int = 1, clip: float = 0, inner: bool = False
) -> Weights:
    model = network()
    wrapped = DistributedDataParallel(model, **options)
    optimizer = optimizer_of(model if inner else wrapped, process_group=dist.group.WORLD)
    assert [group["name"] for group in optimizer.param_groups] == ["whitened", "embeddings", "head", "other"]
    for step in range(STEPS):
        parts = list(zip(*(of.chunk(micro) for of in share(step, rank, ranks))))
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else wrapped.no_sync():
                (loss_of(wrapped, *part, uses(step, rank)) / micro).backward()
        if clip:
            clip_grad_norm_(wrapped.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


@pytest.mark.parametrize(
    ("ranks", "uses", "options", "how"),
    [
        (3, always, {}, {"inner": True}),
        (2, always, {}, {"micro": 3}),
        (4, always, {"static_graph": True}, {}),
        (2, always, {"gradient_as_bucket_view": True}, {"clip": CLIP}),
        (3, but_for_rank_one, {"find_unused_parameters": True}, {"inner": True}),
        (2, now_and_then, {"find_unused_parameters": True}, {}),
        (2, either, {"find_unused_parameters": True}, {"micro": 2, "clip": CLIP}),
    ],
)
def test_distributed_data_parallel(ranks: int, uses: Uses, options: dict[str, Any], how: dict[str, Any]) -> None:
    """Accumulated and clipped gradients, layers that some or all ranks go past, groups of either model."""
    found = on_ranks(ranks, partial(ddp, **how), ranks, uses, options)
    assert_as_one(found, alone(ranks, uses, how.get("clip", 0)))


def two_worlds(rank: int) -> Weights:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    model = network()
    wrapped, optimizer = DistributedDataParallel(model, process_group=mine), optimizer_of(model, process_group=mine)
    train(wrapped, optimizer, rank % 2, 2, first=rank // 2 * 100)
    return result(model, optimizer)


def test_process_groups_that_are_not_the_world_train_models_of_their_own() -> None:
    found = on_ranks(4, two_worlds)
    assert_as_one(found[:2], alone())
    assert_as_one(found[2:], alone(first=100))


class LinearLoss(nn.Module):
    """Of the weights: gradients do not depend on them. In bf16 those of a network would, by rounding, in percents."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: int, rank: int) -> Tensor:
        parameters = list(self.model.parameters())
        slopes = slopes_of(self.model, step, rank, parameters[0].dtype)
        return torch.stack([(p * slope).sum() for p, slope in zip(parameters, slopes)]).sum()


def slopes_of(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> list[Tensor]:
    """The gradients of a LinearLoss."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    return [torch.randn(p.shape, generator=generator).to(dtype) for p in model.parameters()]


def low_precision(rank: int, shared: bool) -> Weights:
    model = network(torch.bfloat16)
    wrapped = DistributedDataParallel(LinearLoss(model))
    optimizer = optimizer_of(model, process_group=dist.group.WORLD if shared else None)
    for step in range(STEPS):
        wrapped(step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def test_bf16_parameters_step_as_when_every_rank_does_all() -> None:
    """Gradients and weights of bf16 are those that each rank would compute by itself, but for the last bit."""
    everyone, shared = on_ranks(2, low_precision, False), on_ranks(2, low_precision, True)
    assert_as_one(shared, everyone[0], rtol=2**-7, atol=1e-5)


def zero(rank: int, ranks: int) -> Weights:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SPlus, **OPTIONS, spread_refreshes=False, sides="shorter")
    train(model, optimizer, rank, ranks)
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def test_zero_redundancy_optimizer_trains_as_one_process() -> None:
    """Where refreshes are not spread: each rank's parameters are a group, whose matrices take turns."""
    model = network()
    train(model, SPlus(model.parameters(), **OPTIONS, spread_refreshes=False, sides="shorter"))
    assert_as_one(on_ranks(3, zero, 3), {name: p.detach() for name, p in model.named_parameters()})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, ranks: int = 1, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        loss_of(model, *share(step, rank, ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


# fully_shard


def sharded(model: Network, mesh: Any, **options: Any) -> Network:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def line(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks,))


def fsdp(rank: int, ranks: int, uses: Uses, options: dict[str, Any], **how: Any) -> Weights:
    model = sharded(network(), line(ranks), **options)
    optimizer = optimizer_of(model)
    train_sharded(model, optimizer, rank, ranks, uses, **how)
    return result(model, optimizer)


def train_sharded(
    model: Network,
    optimizer: SPlus,
    rank: int,
    ranks: int,
    uses: Uses = always,
    micro: int = 1,
    clip: float = 0,
    scaled: bool = False,
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    for step in range(STEPS):
        parts = list(zip(*(of.chunk(micro) for of in share(step, rank, ranks))))
        for part in parts:
            model.set_requires_gradient_sync(part is parts[-1])
            scaler.scale(loss_of(model, *part, uses(step, rank)) / micro).backward()
        scaler.unscale_(optimizer)
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("ranks", "uses", "options", "how"),
    [
        (3, always, {"reshard_after_forward": True}, {}),
        (4, always, {"reshard_after_forward": False}, {"scaled": True}),
        (2, always, {}, {"micro": 3}),
        (4, now_and_then, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"clip": CLIP}),
    ],
)
def test_fully_shard(ranks: int, uses: Uses, options: dict[str, Any], how: dict[str, Any]) -> None:
    """Uneven and empty shards; accumulated, scaled and clipped gradients; a layer that is left out now and then."""
    found = on_ranks(ranks, partial(fsdp, **how), ranks, uses, options)
    assert_as_one(found, alone(ranks, uses, how.get("clip", 0)))


def mixed_precision(rank: int) -> Weights:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(network(torch.float32), line(2), mp_policy=policy)
    optimizer = optimizer_of(model, normalization_decay=0.0)
    for step in range(STEPS):
        x, y = share(step, rank, 2)
        (model(x.bfloat16()).float() - y.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def test_mixed_precision_of_fully_shard() -> None:
    """As one process whose gradients are those of bf16 copies of the model, averaged in fp32.

    By signs: a last digit of a weight may round to another one in bf16, which gradients and soft signs pass on.
    """
    model = network(torch.float32)
    optimizer = optimizer_of(model, normalization_decay=0.0)
    for step in range(STEPS):
        for rank in range(2):
            low = copy.deepcopy(model).bfloat16()
            low.zero_grad()
            x, y = share(step, rank, 2)
            (low(x.bfloat16()).float() - y.float()).square().mean().backward()
            for parameter, of_low in zip(model.parameters(), low.parameters()):
                part = of_low.grad.float() / 2
                parameter.grad = part if rank == 0 else parameter.grad + part
        optimizer.step()
        optimizer.zero_grad()
    assert_as_one(on_ranks(2, mixed_precision), result(model, optimizer), rtol=1e-3, atol=1e-4)


def mixed_precision_of_slopes(rank: int) -> Weights:
    model = network(torch.float32)
    loss = LinearLoss(model)
    fully_shard(loss, mesh=line(2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss(step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def test_gradients_of_mixed_precision_are_added_up_in_full() -> None:
    """Those of bf16 weights, where they do not depend on the weights: all else is as in one process, in fp32."""
    model = network(torch.float32)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        slopes = [slopes_of(model, step, rank, torch.bfloat16) for rank in range(2)]
        for parameter, *of_ranks in zip(model.parameters(), *slopes):
            parameter.grad = sum(slope.float() for slope in of_ranks) / 2
        optimizer.step()
    assert_as_one(on_ranks(2, mixed_precision_of_slopes), result(model, optimizer), rtol=1e-5, atol=1e-6)


def special_models(rank: int) -> list[Weights]:
    """Ignored parameters that are averaged by hand; a model that is materialized; one whose modules differ in mesh."""
    ignoring = network()
    ignored = {ignoring.embedding.bias, ignoring.optional.weight}
    fully_shard(ignoring, ignored_params=ignored)
    with torch.device("meta"):
        materialized = Network().double()
    sharded(materialized, line(4)).to_empty(device="cpu")
    with torch.no_grad():
        for empty, value in zip(materialized.parameters(), network().parameters()):
            empty.copy_(distribute_tensor(value, empty.device_mesh, empty.placements))
    mixed = network()
    fully_shard(mixed.blocks[0], mesh=line(4))
    fully_shard(mixed.blocks[1], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    found = []
    for model in (ignoring, materialized, mixed):
        optimizer = optimizer_of(model, process_group=None if model is materialized else dist.group.WORLD)
        for step in range(STEPS):
            loss_of(model, *share(step, rank, 4)).backward()
            for plain in (p for p in model.parameters() if not isinstance(p, DTensor)):
                dist.all_reduce(plain.grad)
                plain.grad /= 4
            optimizer.step()
            optimizer.zero_grad()
        found.append(result(model, optimizer))
    return found


def test_plain_and_sharded_parameters_of_several_meshes_in_one_optimizer() -> None:
    for found in zip(*on_ranks(4, special_models)):
        assert_as_one(found, alone(4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, 7), Block(7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(x)))


def tied(rank: int, ranks: int) -> Weights:
    torch.manual_seed(1)
    model = Tied().double()
    if ranks > 1:
        fully_shard(model, mesh=line(ranks))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x = torch.randint(11, (BATCH,), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        nn.functional.cross_entropy(model(x), (x + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def test_tied_weights_under_fully_shard() -> None:
    assert_as_one(on_ranks(4, tied, 4), tied(0, 1))


def changing_groups(rank: int, ranks: int) -> Weights:
    """Groups come and go by hand, a scheduler runs, averages are put in for a validation."""
    model = network()
    if ranks > 1:
        sharded(model, line(ranks))
    first, *others = param_groups(model)
    optimizer = SPlus([first], **OPTIONS)
    for step in range(STEPS):
        if step in (0, 3):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loss_of(model, *share(step, rank, ranks)).backward()
        optimizer.step()
        scheduler.step()
        if step == 2:
            for group in others:
                optimizer.add_param_group(group)
        if step == 4:
            del optimizer.param_groups[1], scheduler.base_lrs[1]
        with optimizer.averaged(), torch.no_grad():
            model(share(step)[0])
        optimizer.metrics()
        model.zero_grad()
    return result(model, optimizer)


def test_groups_that_come_and_go_and_validations_between_steps() -> None:
    """A forward pass of averaged weights leaves nothing behind that the next training step would compute with."""
    assert_as_one(on_ranks(3, changing_groups, 3), changing_groups(0, 1))


# What modules of fully_shard have gathered


def seen(rank: int, options: dict[str, Any]) -> None:
    model = sharded(network(), line(2), **options)
    optimizer, dense, x = optimizer_of(model), network(), share(50)[0]
    train(model, optimizer, rank, 2)
    for mode in (False, True, False):
        with torch.no_grad():
            model(x)  # gathers the weights of the mode before
            optimizer.train(mode)
            found = model(x)
            dense.load_state_dict({name: whole(value).clone() for name, value in model.state_dict().items()})
            torch.testing.assert_close(found, dense(x), **EXACT)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": True}])
def test_a_forward_pass_sees_the_switch_whatever_was_gathered_before(options: dict[str, Any]) -> None:
    """The root, and modules with reshard_after_forward=False, keep what they gathered until a backward pass."""
    on_ranks(2, seen, options)
