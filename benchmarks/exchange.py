"""What sharing the work of a step among ranks costs and saves: seconds and bytes, beside every rank doing all of it.

    torchrun --nproc-per-node=2 -m benchmarks.exchange

Three optimizers take turns, over two periods of refreshes: SPlus on each rank by itself ("replicated"), with
``process_group`` on parameters that every rank holds ("DDP"), and on DTensors sharded by rows ("FSDP"). Columns:

step      seconds, mean over whole periods; where ranks share cores this says little
compute   processor seconds of the busiest rank's own thread, which communication does not use while it waits
of one    that over what replicated work takes; as small as 1/ranks, if the matrices can be shared evenly
sent      megabytes that the busiest rank hands over for other ranks in a step
planned   the same by the plan of ownership
state     megabytes of momentum, factors and bases of the fullest rank
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.contenders import SETS, ParameterSet
from splus import SPlus
from splus.owned import OwnedTensor
from splus.teams import region, shard_of

PERIOD = 10
MEGA = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", choices=SETS, default="large")
    parser.add_argument("--periods", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rows = measure(SETS[options.set](), options.periods)
        if dist.get_rank() == 0:
            Console(width=120).print(table(rows, options.set))
    finally:
        dist.destroy_process_group()


class Shared:
    """SPlus on parameters of a set, with fixed gradients."""

    def __init__(self, shapes: ParameterSet, kind: str) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in (*shapes.matrices, *shapes.others)]
        gradients = [torch.randn(value.shape, generator=generator) for value in values]
        if kind == "FSDP":
            values, gradients = ([by_rows(value) for value in tensors] for tensors in (values, gradients))
        self.parameters = [torch.nn.Parameter(value) for value in values]
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        group = dist.group.WORLD if kind == "DDP" else None
        self.optimizer = SPlus(
            [
                {"params": self.parameters[: len(shapes.matrices)], "whiten": True},
                {"params": self.parameters[len(shapes.matrices) :], "whiten": False},
            ],
            precondition_frequency=PERIOD,
            refresh_growth=None,
            process_group=group,
        )

    def planned(self) -> int:
        """Bytes that the busiest rank sends to others in a step."""
        sent = [0] * dist.get_world_size()
        for books in self.optimizer._books:
            for ownership in books.sharing.ownerships.values():
                sent = [a + b for a, b in zip(sent, ownership.traffic()[0])]
        return 4 * max(sent)

    def state(self) -> int:
        """Bytes of what this rank has of the state of matrices."""
        kept = 0
        for of in self.optimizer.state.values():
            for name, value in of.items():
                if "peak" in of and isinstance(value, Tensor) and name != "average":
                    kept += (value.parts if isinstance(value, OwnedTensor) else value).nbytes
        return kept


def by_rows(value: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = value[region(*shard_of(value.shape, mesh.shape, mesh.get_coordinate() or (), [Shard(0)]))].clone()
    return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collects the bytes that this rank hands over for others, in all-to-alls and to single ranks."""
    counts = [0]
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def counting_all(output: Tensor, given: Tensor, *arguments: Any, **named: Any) -> Any:
        counts[0] += given.nbytes
        return all_to_all(output, given, *arguments, **named)

    def counting_batch(operations: list[dist.P2POp]) -> Any:
        counts[0] += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return batch(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counting_all, counting_batch  # type: ignore[assignment]
    try:
        yield counts
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch


def measure(shapes: ParameterSet, periods: int) -> list[dict[str, Any]]:
    """One row for each way, with the numbers of the busiest rank."""
    ways = {kind: Shared(shapes, kind) for kind in ("replicated", "DDP", "FSDP")}
    wall: Mapping[str, list[float]] = {kind: [] for kind in ways}
    own: Mapping[str, list[float]] = {kind: [] for kind in ways}
    sent = dict.fromkeys(ways, 0)
    for number in range((1 + periods) * PERIOD):
        for kind, way in ways.items():
            dist.barrier()
            started, thread = time.perf_counter(), time.thread_time()
            with counted() as counts:
                way.optimizer.step()
            if number >= PERIOD:  # the first period has full decompositions
                wall[kind].append(time.perf_counter() - started)
                own[kind].append(time.thread_time() - thread)
                sent[kind] = counts[0]
    rows = []
    for kind, way in ways.items():
        numbers = busiest([statistics.mean(wall[kind]), statistics.mean(own[kind]), sent[kind], way.state()])
        rows.append({"way": kind, "planned": way.planned()} | dict(zip(("step", "compute", "sent", "state"), numbers)))
    return rows


def busiest(numbers: list[float]) -> list[float]:
    """The largest of each number over the ranks."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    result: list[float] = largest.tolist()
    return result


def table(rows: list[dict[str, Any]], name: str) -> Table:
    one = rows[0]["compute"]
    shown = Table("", "step s", "compute s", "of one", "sent MB", "planned MB", "state MB")
    shown.title = f"{dist.get_world_size()} ranks, set {name!r}, one thread each"
    for row in rows:
        megabytes = (f"{row[column] / MEGA:.2f}" for column in ("sent", "planned", "state"))
        shown.add_row(
            row["way"], f"{row['step']:.3f}", f"{row['compute']:.3f}", f"{row['compute'] / one:.3f}", *megabytes
        )
    return shown


if __name__ == "__main__":
    main()
