"""Teams: the ranks that share the work on a parameter, and what each of them holds of it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from splus.matrices import MatrixLayout
from splus.ownership import Box, Loads, held_box, whole

ProcessGroup = dist.ProcessGroup
Shard = tuple[tuple[int, ...], tuple[int, ...]]  # offset and sizes


def local(tensor: Tensor) -> Tensor:
    """What this rank holds: the local tensor of a DTensor, any other tensor as it is. Both share their memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without the import that nobody who has none should wait for."""
    return type(tensor) not in (Tensor, torch.nn.Parameter) and hasattr(tensor, "placements")


def held_gradient(parameter: Any) -> Tensor:
    """What this rank holds of a parameter's gradient, placed as the parameter is; communicates if it was not."""
    gradient = parameter.grad
    if is_dtensor(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local(gradient)


def gather_anew(parameters: Iterable[Tensor]) -> None:
    """Have the modules of ``fully_shard`` gather these parameters in their next forward pass, whatever they hold now.

    After a forward pass without a backward pass the root module keeps what it has gathered, and so does every module
    with ``reshard_after_forward=False``.
    """
    if not any(is_dtensor(parameter) for parameter in parameters):
        return
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            module.reshard()


class Team:
    """The ranks of a process group that share matrices, each of which has one owner among them.

    Attributes:
        ranks: their numbers in the world, in the order of the group.
        rank: of this process in the group.
        loads: what they have been given to do so far.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.loads = Loads(len(self.ranks))
        self._known_shards: dict[Any, list[Shard]] = {}

    def copies(self, parameter: Tensor) -> int:
        """How many ranks of the team hold what this rank holds of a parameter."""
        if not is_dtensor(parameter):
            return len(self.ranks)
        shards = self._shards(parameter)
        return shards.count(shards[self.rank])

    def held(self, parameter: Tensor, layout: MatrixLayout) -> list[Box | None]:
        """What each rank of the team holds of a whitened parameter."""
        if not is_dtensor(parameter):
            return [whole(layout)] * len(self.ranks)
        return [held_box(layout, *shard) for shard in self._shards(parameter)]

    def check(self, parameter: Any) -> None:
        """Raise for a DTensor that the ranks of the team do not hold all of, or not as it is."""
        if not is_dtensor(parameter):
            return
        if any(placement.is_partial() for placement in parameter.placements):
            raise ValueError(
                f"a DTensor placed as {parameter.placements} is given; SPlus updates sharded and replicated ones. "
                "Redistribute it before making the optimizer."
            )
        if sum(math.prod(sizes) for _, sizes in set(self._shards(parameter))) != parameter.numel():
            raise ValueError(
                f"the ranks {list(self.ranks)} of the process group do not hold all of a DTensor placed as "
                f"{parameter.placements} on {parameter.device_mesh}. "
                "Give SPlus a process group of all ranks that hold shards of one copy, or none."
            )

    def _shards(self, parameter: Any) -> list[Shard]:
        """What each rank holds of a DTensor."""
        mesh = parameter.device_mesh
        kind = (parameter.shape, mesh, parameter.placements)
        if kind not in self._known_shards:
            places = {rank: index for index, rank in enumerate(mesh.mesh.flatten().tolist())}
            coordinates = (unravel(places[rank], mesh.shape) for rank in self.ranks)
            self._known_shards[kind] = [
                shard_of(parameter.shape, mesh.shape, at, parameter.placements) for at in coordinates
            ]
        return self._known_shards[kind]


class Teams:
    """The teams of an optimizer's parameters.

    Args:
        process_group: the ranks that share the work on parameters which all of them hold; a DTensor is shared by those
            ranks of its mesh that are in it. Without one a DTensor is shared by its whole mesh, others by nobody.
    """

    def __init__(self, process_group: ProcessGroup | None) -> None:
        if not isinstance(process_group, ProcessGroup | None):
            raise ValueError(
                f"process_group={process_group!r} is given; it must be a torch.distributed.ProcessGroup, such as "
                "torch.distributed.group.WORLD after init_process_group(), or None."
            )
        self.process_group = process_group
        self._teams: dict[tuple[int, ...], Team] = {}

    def of(self, parameter: Tensor) -> Team | None:
        """The team of a parameter; None if it is this process's alone. All ranks of a new team must ask for it."""
        if is_dtensor(parameter):
            return self._of_mesh(parameter.device_mesh)  # type: ignore[attr-defined]
        if self.process_group is None:
            return None
        return self._team(tuple(dist.get_process_group_ranks(self.process_group)), self.process_group)

    def start_anew(self) -> None:
        """Nobody has been given anything to do."""
        for team in self._teams.values():
            team.loads = Loads(len(team.ranks))

    def _of_mesh(self, mesh: Any) -> Team:
        ranks = set(mesh.mesh.flatten().tolist())
        if self.process_group is not None:
            shared = tuple(rank for rank in dist.get_process_group_ranks(self.process_group) if rank in ranks)
            if not shared:
                raise ValueError(
                    f"a DTensor on {mesh} is given, and no rank of the process group holds any of it. "
                    "Give SPlus a process group of all ranks that hold shards of one copy, or none."
                )
            group = self.process_group if len(shared) == dist.get_world_size(self.process_group) else None
            return self._team(shared, group)
        return self._team(tuple(sorted(ranks)), mesh.get_group() if mesh.ndim == 1 else None)

    def _team(self, ranks: tuple[int, ...], group: ProcessGroup | None) -> Team:
        if ranks not in self._teams:
            if group is None and len(ranks) == dist.get_world_size():
                group = dist.group.WORLD
            self._teams[ranks] = Team(group or dist.new_group(ranks, use_local_synchronization=True))
        return self._teams[ranks]


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The place of entry number ``index`` of a tensor of this shape, its entries in order."""
    places = []
    for length in reversed(shape):
        index, place = divmod(index, length)
        places.append(place)
    return tuple(reversed(places))


def region(offset: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """The entries of a tensor from ``offset`` on, as an index."""
    return tuple(slice(first, first + size) for first, size in zip(offset, sizes))


def shard_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> Shard:
    """Offset and sizes of what the rank at a coordinate of a mesh holds of a DTensor of this shape.

    A strided shard (of FSDP over tensor parallelism) cuts what the mesh dimensions after it have cut already.
    """
    offset, sizes = [0] * len(shape), list(shape)
    sharding = [i for i, placement in enumerate(placements) if hasattr(placement, "dim")]
    for i in sorted(sharding, key=lambda i: hasattr(placements[i], "split_factor")):
        dim = placements[i].dim
        size = -(-sizes[dim] // mesh_shape[i])
        first = min(sizes[dim], size * coordinate[i])
        offset[dim], sizes[dim] = offset[dim] + first, min(size, sizes[dim] - first)
    return tuple(offset), tuple(sizes)
