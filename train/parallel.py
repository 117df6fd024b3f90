"""Processes that train one model together: how it is spread over them, and what they tell each other."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from train.models.transformer import Block


@contextmanager
def joined(parallel: DictConfig) -> Iterator[None]:
    """This process among those that torchrun has started, if ``parallel.mode`` is not "none"."""
    if parallel.mode == "none" or "RANK" not in os.environ:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Gloo carries what is said between processes on the CPU, without waiting for a device.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=parallel.timeout)
    store, rank, number = next(rendezvous("env://", timeout=timeout))
    # After a restart torchrun's store may still have the addresses of processes that are gone.
    store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=number, timeout=timeout)
    try:
        yield
    except Exception:  # the group may be broken: this process leaves without a word, and the others will notice
        raise
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, of which this is number ``rank``. All of them call the methods that communicate."""

    rank: int = 0
    number: int = 1

    @classmethod
    def of(cls, config: DictConfig) -> "Ranks":
        """Those that have joined.

        Raises:
            ValueError: they are not what ``config.parallel`` asks for, or the batch cannot be shared equally.
        """
        mode = config.parallel.mode
        number = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        if mode == "none" and number > 1:
            raise ValueError(
                f"{number} processes were started with parallel=none, and each would write the same directory; "
                "add parallel=ddp, parallel=fsdp or parallel=hsdp, or start one process"
            )
        if mode != "none" and not dist.is_initialized():
            raise ValueError(
                f"parallel={mode} needs processes that know of each other; "
                f"start them with: torchrun --nproc-per-node=2 -m train parallel={mode} …"
            )
        if config.batch_size % number:
            raise ValueError(
                f"batch_size={config.batch_size} does not divide by the {number} processes; set batch_size="
                f"{-(-config.batch_size // number) * number}, or start a number of processes that divides it"
            )
        return cls(dist.get_rank(), number) if dist.is_initialized() else cls()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """This rank's rows of a batch, as many as every other's."""
        size = len(batch[0]) // self.number
        return tuple(tensor[self.rank * size : (self.rank + 1) * size] for tensor in batch)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Over the ranks; communicates."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        """Over the ranks; communicates."""
        return int(self._reduced([number], dist.ReduceOp.MAX)[0])

    def _reduced(self, numbers: Sequence[float], operation: Any) -> list[float]:
        if self.number == 1:
            return list(numbers)
        reduced = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(reduced, operation)
        return [float(number) for number in reduced]

    def from_first(self, value: Any) -> Any:
        """The first rank's value; communicates."""
        if self.number == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def on_first(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function`` returns on the first rank, which alone calls it; communicates.

        Raises:
            RuntimeError: it has raised there, where its own exception is raised.
        """
        value, failure, raised = None, None, None
        if self.first:
            try:
                value = function(*arguments)
            except Exception as error:
                raised, failure = error, f"{type(error).__name__}: {error}"
        value, failure = self.from_first((value, failure))
        if raised is not None:
            raise raised
        if failure is not None:
            raise RuntimeError(f"Rank 0 has raised {failure}")
        return value


class Whole:
    """A model of one process.

    Attributes:
        module: what to call for a loss. Evaluation calls the model itself.
        process_group: of ranks that hold the same whole parameters.
    """

    process_group: dist.ProcessGroup | None = None

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def gradients(self, last: bool) -> AbstractContextManager[Any]:
        """For a backward pass: the ``last`` one of a step averages the gradients over the ranks."""
        return nullcontext()

    def reshard(self) -> None:
        """Give up whole weights that a forward pass without backward has left, which would hide a change of them."""


class Replicated(Whole):
    """Every rank has the whole model (DDP)."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.process_group = dist.group.WORLD
        devices = [device] if device.type == "cuda" else None
        self.module: nn.Module = nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def gradients(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.module.no_sync()  # type: ignore[operator]


class Sharded(Whole):
    """Every rank has a part of each parameter (FSDP2), in groups of ``shard_size`` if not all together (HSDP)."""

    def __init__(self, model: nn.Module, device: torch.device, shard_size: int | None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        number = dist.get_world_size()
        if shard_size is None:
            mesh = init_device_mesh(device.type, (number,))
        else:
            shape = (number // shard_size, shard_size)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.module = model
        self.shards = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def gradients(self, last: bool) -> AbstractContextManager[Any]:
        for module in self.shards:
            module.set_requires_gradient_sync(last, recurse=False)
        return nullcontext()

    def reshard(self) -> None:
        for module in self.shards:
            module.reshard()


def spread(model: nn.Module, parallel: DictConfig, device: torch.device) -> Whole:
    """Spread the parameters of ``model`` over the ranks as ``parallel.mode`` says, in place."""
    if parallel.mode == "none":
        return Whole(model)
    if parallel.mode == "ddp":
        return Replicated(model, device)
    return Sharded(model, device, None if parallel.mode == "fsdp" else shard_size(parallel.shard_size))


def shard_size(given: int | None) -> int:
    """Ranks that hold one model together."""
    number = dist.get_world_size()
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", number))
    size = given or (of_node if of_node < number else min(2, number))
    if number % size:
        sizes = ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
        raise ValueError(f"parallel.shard_size={size} does not divide the {number} processes; set one of {sizes}")
    return size


def local_device() -> torch.device:
    """The device of this process."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
