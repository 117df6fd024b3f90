"""Hybrid sharding, tensor parallelism, both together, experts: what one process does, bit-equal ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from ranks import on_ranks
from test_distributed import whole
from test_distributed_engines import (
    CLIP,
    OPTIONS,
    STEPS,
    Weights,
    alone,
    always,
    assert_as_one,
    line,
    loss_of,
    network,
    now_and_then,
    optimizer_of,
    result,
    sharded,
    share,
    train_sharded,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

from splus import SPlus
from splus.teams import shard_of


def hybrid(rank: int, within: bool, options: dict[str, Any], how: dict[str, Any]) -> Weights:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = sharded(network(), mesh, **options)
    optimizer = optimizer_of(model, process_group=mesh["shards"].get_group() if within else None)
    train_sharded(model, optimizer, rank, 4, **how)
    assert {len(team.ranks) for books in optimizer._books for team in books.sharing.teams.values()} == {
        2 if within else 4
    }
    return result(model, optimizer)


@pytest.mark.parametrize(
    ("within", "options", "how"),
    [
        (False, {}, {"micro": 3}),
        (True, {}, {"uses": now_and_then, "clip": CLIP}),
        (False, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"micro": 2, "clip": CLIP, "scaled": True}),
    ],
)
def test_hybrid_sharding(within: bool, options: dict[str, Any], how: dict[str, Any]) -> None:
    """All four ranks share the work, or the two of each copy do all of it; gradients as of :func:`test_fully_shard`."""
    expected = alone(4, how.get("uses", always), how.get("clip", 0))
    assert_as_one(on_ranks(4, hybrid, within, options, how), expected)


def tensor_parallel(rank: int, shards: int, copies: int, width: int, micro: int, clip: float) -> Weights:
    """The second block is sequence parallel; with copies, fully_shard is around both."""
    names = ("data", "tensor")
    mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=names)
    of_tensors, model = mesh["tensor"], network(width=width)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.blocks[0], of_tensors, plan)
    model.blocks[1].residual = False
    into = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),))
    parallelize_module(model.blocks[1], of_tensors, into)
    plan = {"norm": SequenceParallel(sequence_dim=0), "up": ColwiseParallel(input_layouts=Shard(0))}
    parallelize_module(model.blocks[1], of_tensors, plan | {"down": RowwiseParallel()})
    if copies > 1:
        sharded(model, mesh["data"])
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for part in zip(*(of.chunk(micro) for of in share(step, rank // shards, copies, width))):
            (loss_of(model, *part) / micro).backward()
        if copies == 1:
            assert model.blocks[1].norm.weight.grad.placements == (Partial(),)
        if clip:
            norm = torch.stack([whole(p.grad).norm() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad.mul_(min(clip / (norm.item() + 1e-6), 1.0))  # clip_grad_norm_, which refuses several meshes
        optimizer.step()
        optimizer.zero_grad()
    if copies > 1:
        assert "_StridedShard" in str(model.blocks[0].up.weight.placements)
    return result(model, optimizer)


@pytest.mark.parametrize(
    ("shards", "copies", "width", "micro", "clip"),
    [(3, 1, 12, 2, CLIP), (2, 2, 12, 1, CLIP), (2, 2, 10, 3, 0)],
)
def test_tensor_parallelism(shards: int, copies: int, width: int, micro: int, clip: float) -> None:
    """By columns, by rows and by sequence, alone and under fully_shard, with gradients that are not placed as weights,
    accumulated, and clipped by their norm.

    Ten rows in two shards of five are cut unevenly by fully_shard.
    """
    expected = straight(copies, width, clip)
    assert_as_one(on_ranks(shards * copies, tensor_parallel, shards, copies, width, micro, clip), expected)


def straight(ranks: int, width: int, clip: float) -> Weights:
    """:func:`alone` without a residual around the second block."""
    model = network(width=width)
    model.blocks[1].residual = False
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(model, *share(step, width=width)).backward()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def places(rank: int) -> list[tuple[Any, Any]]:
    """What this rank holds of parameters, as :func:`shard_of` and as torch says; offsets only of what is not empty."""
    found = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for rows in (2, 3, 4, 5, 7, 8, 10, 12):
        for dim in (0, 1):
            for by in (ColwiseParallel(), RowwiseParallel()):
                layer = parallelize_module(nn.Linear(rows, rows + 1), mesh["tensor"], by)
                even = layer.weight.to_local().shape[dim] % 2 == 0
                if dim == 1 and not even:
                    continue  # which fully_shard refuses
                fully_shard(layer, mesh=mesh["data"], shard_placement_fn=lambda p, dim=dim: Shard(min(dim, p.ndim - 1)))
                for p in layer.parameters():
                    sizes, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
                    at = shard_of(p.shape, p.device_mesh.shape, p.device_mesh.get_coordinate(), p.placements)
                    nothing = 0 in sizes
                    found.append(((at[1], nothing or at[0]), (tuple(p.to_local().shape), nothing or tuple(offset))))
    return found


def test_what_a_rank_holds_is_what_torch_says() -> None:
    """Also of what fully_shard cuts after tensor parallelism has cut it, evenly and unevenly."""
    for of_rank in on_ranks(4, places):
        for found, expected in of_rank:
            assert found == expected


def experts(rank: int, ranks: int) -> Weights:
    torch.manual_seed(0)
    stack = torch.randn(5, 6, 6, dtype=torch.float64)
    place = partial(distribute_tensor, device_mesh=line(ranks), placements=[Shard(0)]) if ranks > 1 else torch.clone
    model = nn.ParameterDict({"experts": nn.Parameter(place(stack))})
    optimizer = SPlus([{"params": [model["experts"]], "stacked": True}], **OPTIONS)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        model["experts"].grad = place(torch.randn(5, 6, 6, generator=generator, dtype=torch.float64))
        optimizer.step()
    return result(model, optimizer)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_different_ranks(ranks: int) -> None:
    assert_as_one(on_ranks(ranks, experts, ranks), experts(0, 1))
