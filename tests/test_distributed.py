"""Ranks that share their work: the answer of a single process, and the same weights on every rank bit for bit."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from splus import SPlus
from splus.teams import region, shard_of

SHAPES: Mapping[str, tuple[int, ...]] = {
    "square": (6, 6),
    "tall": (10, 4),
    "fused": (9, 3),
    "long": (5, 12),  # beyond the limit: two blocks of 5×6
    "experts": (3, 4, 5),
    "convolution": (4, 3, 2, 2),
    "few_rows": (2, 7),  # fewer rows than ranks
    "embedding": (11, 3),
    "norm": (5,),
    "scalar": (),
}
OPTIONS: dict[str, Any] = {"lr": 0.3, "max_preconditioner_dim": 10, "precondition_frequency": 4, "ema_decay": 0.8}
FP32 = {"rtol": 2e-5, "atol": 2e-6}

Make = Callable[[str, Tensor], Tensor]


def values(name: str, key: object) -> Tensor:
    """Full-rank, and the same on every rank."""
    generator = torch.Generator().manual_seed(hash_of(name, key))
    return torch.randn(SHAPES[name], generator=generator)


def hash_of(name: str, key: object) -> int:
    return sum(ord(letter) * 31**i for i, letter in enumerate(f"{name}{key}")) % 2**31


def groups(parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    whitened = ["square", "tall", "fused", "long", "convolution", "few_rows"]
    return [
        {
            "params": [parameters[name] for name in whitened],
            "whiten": True,
            "split": [3 if name == "fused" else None for name in whitened],
        },
        {"params": [parameters["experts"]], "whiten": True, "stacked": True},
        {"params": [parameters[name] for name in ("embedding", "norm", "scalar")], "whiten": False},
    ]


# How parameters are placed on the ranks


def replicated(rank: int, ranks: int) -> Make:
    return lambda name, value: value.clone()


def placed(mesh: Any, placements: Callable[[str], tuple[Any, ...]]) -> Make:
    def make(name: str, value: Tensor) -> Tensor:
        at = placements(name)
        shard = value[region(*shard_of(value.shape, mesh.shape, mesh.get_coordinate(), at))].clone()
        return DTensor.from_local(shard, mesh, at, run_check=False, shape=value.shape, stride=value.stride())

    return make


def by_rows(name: str) -> Any:
    return Shard(0) if SHAPES[name] else Replicate()


def fsdp(rank: int, ranks: int) -> Make:
    return placed(init_device_mesh("cpu", (ranks,)), lambda name: (by_rows(name),))


def hsdp(rank: int, ranks: int) -> Make:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    return placed(mesh, lambda name: (Replicate(), by_rows(name)))


def tensor_parallel(rank: int, ranks: int) -> Make:
    """Some by rows, some by columns, some whole."""
    dims = {
        "square": 1,
        "tall": 0,
        "fused": 1,
        "long": 1,
        "convolution": 1,
        "few_rows": 0,
        "embedding": 1,
        "experts": 2,
    }
    mesh = init_device_mesh("cpu", (ranks,))
    return placed(mesh, lambda name: (Shard(dims[name]) if name in dims else Replicate(),))


MODES = {"ddp": replicated, "fsdp": fsdp, "hsdp": hsdp, "tensor_parallel": tensor_parallel}
CASES = [
    *((mode, ranks) for mode in ("ddp", "fsdp", "tensor_parallel") for ranks in (1, 2, 3, 4)),
    ("hsdp", 2),
    ("hsdp", 4),
]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Run:
    """An optimizer on parameters that are placed by ``make``, with gradients from :func:`values`."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.make = make
        self.model = torch.nn.Module()
        for name in SHAPES:
            self.model.register_parameter(name, torch.nn.Parameter(make(name, values(name, "start").to(dtype))))
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = SPlus(groups(self.parameters), **OPTIONS | options)

    def step(self, number: int, without: tuple[str, ...] = ()) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name not in without:
                parameter.grad = self.make(name, values(name, number).to(parameter.dtype))
        self.optimizer.step()

    def result(self) -> dict[str, Tensor]:
        found = {name: whole(parameter.detach()).clone() for name, parameter in self.parameters.items()}
        with self.optimizer.averaged():
            averages = {f"{name}, averaged": whole(p.detach()).clone() for name, p in self.parameters.items()}
        return found | averages


def shared_options(mode: str) -> dict[str, Any]:
    return {"process_group": dist.group.WORLD} if mode == "ddp" else {}


def steps_of(run: Run, steps: int = 14) -> dict[str, Tensor]:
    for number in range(steps):
        run.step(number, without=("tall", "norm") if number % 3 == 1 else ())
    return run.result()


def on_rank(rank: int, mode: str, ranks: int) -> dict[str, Tensor]:
    return steps_of(Run(MODES[mode](rank, ranks), **shared_options(mode)))


@pytest.mark.parametrize(("mode", "ranks"), CASES)
def test_same_answer_as_one_process(mode: str, ranks: int) -> None:
    """Also with parameters that have no gradient in some steps, in either mode of the optimizer."""
    alone = steps_of(Run(lambda name, value: value.clone()))
    everyone = on_ranks(ranks, on_rank, mode, ranks)
    for found in everyone:
        for name, value in found.items():
            assert torch.equal(value, everyone[0][name]), f"{name} differs between ranks"
            torch.testing.assert_close(value, alone[name], **FP32)


# Errors


@pytest.mark.parametrize("given", [True, "gloo", [0, 1]])
def test_process_group_of_another_kind_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a torch\.distributed\.ProcessGroup"):
        SPlus([torch.zeros(3, 3)], process_group=given)
