"""State of matrices that ranks share: a tensor that is whole in shape, of which each rank has the matrices it owns."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from splus.teams import is_dtensor, region, shard_of, unravel

if TYPE_CHECKING:  # a second to import, for those alone who save through it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_aten = torch.ops.aten
# What is done to the parts of every rank alike. Nothing else is done to optimizer state by torch.
_APPLIED_TO_PARTS = (
    _aten.detach.default,
    _aten.clone.default,
    _aten._to_copy.default,
    _aten.mul_.Tensor,
    _aten.copy_.default,
)


class OwnedTensor(Tensor):
    """One kind of state of a parameter's matrices, such as their left factors.

    Its shape is that of the whole. :mod:`torch.distributed.checkpoint` saves and loads the parts that this rank has,
    each by its place in the whole, so that they may have other owners when they are loaded.

    Args:
        shape: of the whole.
        parts: (k, ...), those of this rank's k matrices.
        offsets: of each in the whole.
        sizes: of each as a box of the whole.
    """

    parts: Tensor
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], parts: Tensor, offsets: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> "OwnedTensor":
        tensor: OwnedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=parts.dtype, device=parts.device)
        tensor.parts, tensor.sizes = parts, tuple(sizes)
        tensor.offsets = tuple(tuple(offset) for offset in offsets)
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0]
        others = [arg for arg in args if isinstance(arg, OwnedTensor)]
        if func not in _APPLIED_TO_PARTS or not isinstance(first, OwnedTensor) or not all(map(first.is_like, others)):
            raise RuntimeError(
                f"{func} is called on state of shape {tuple(first.shape)} whose parts are on different ranks; "
                "optimizer.full_state_dict(), called on all ranks, has it whole."
            )
        parts = func(*(arg.parts if isinstance(arg, OwnedTensor) else arg for arg in args), **(kwargs or {}))
        return first if parts is first.parts else OwnedTensor(first.shape, parts, first.offsets, first.sizes)

    def is_like(self, other: Tensor) -> bool:
        """Whether the other's parts are the same ones."""
        return isinstance(other, OwnedTensor) and (self.shape, self.offsets) == (other.shape, other.offsets)

    def assign(self, value: Tensor) -> None:
        """Take the parts from another one's or from the whole."""
        if isinstance(value, OwnedTensor):
            self.parts.copy_(value.parts)
            return
        for part, offset in zip(self.parts, self.offsets):
            part.copy_(value[region(offset, self.sizes)].view(part.shape))

    def whole(self, group: dist.ProcessGroup) -> Tensor:
        """The whole tensor, from all ranks of the group, all of which call this."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for part, offset in zip(self.parts, self.offsets):
            whole[region(offset, self.sizes)] = part.view(self.sizes)
        dist.all_reduce(whole.view(torch.uint8), group=group)  # bytes, of which all but one rank's are zero
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OwnedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.offsets)} parts on this rank)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "This state dict has the matrices of one rank alone, and would lose those of all others in a file. Save it "
            "with torch.distributed.checkpoint, or save optimizer.full_state_dict(), called on all ranks, on one."
        )

    # What torch.distributed.checkpoint asks of a tensor that is not whole on any rank:

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.parts), self.size()),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(self.sizes)) for offset in self.offsets]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> Tensor:
        assert index.offset is not None
        return self.parts[self.offsets.index(tuple(index.offset))].view(self.sizes)


def owned_tensor(parts: Tensor, shape: Sequence[int], indices: Sequence[int]) -> OwnedTensor:
    """Parts number ``indices`` of a tensor of this shape, each a box of neighbouring entries: (k, ...) for k of them.

    The whole is cut along its leading dimensions, as (experts, 3 · m, n) into parts of m×n.
    """
    sizes, room = [1] * len(shape), math.prod(parts.shape[1:])
    for dim in reversed(range(len(shape))):
        sizes[dim] = min(room, shape[dim])
        room //= sizes[dim]
    across = [length // size for length, size in zip(shape, sizes)]
    offsets = [[place * size for place, size in zip(unravel(index, across), sizes)] for index in indices]
    return OwnedTensor(shape, parts, offsets, sizes)


def put(live: Tensor, value: Tensor) -> None:
    """Copy what this rank has of ``live`` from a value that is whole or has the same parts on the same ranks."""
    if isinstance(live, OwnedTensor):
        live.assign(value)
    elif is_dtensor(live) and not is_dtensor(value):
        mesh: Any = live.device_mesh  # type: ignore[attr-defined]
        shard = shard_of(live.shape, mesh.shape, mesh.get_coordinate(), live.placements)  # type: ignore[attr-defined]
        live.to_local().copy_(value[region(*shard)])  # type: ignore[attr-defined]
    else:
        live.copy_(value)


def can_put(live: Tensor, value: Tensor) -> bool:
    """Whether :func:`put` can: the value is whole, or spread over ranks as the live tensor is."""
    if isinstance(value, OwnedTensor):
        return value.is_like(live)
    if is_dtensor(value):
        return is_dtensor(live) and value.device_mesh == live.device_mesh and value.placements == live.placements  # type: ignore[attr-defined]
    return True


def full(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The whole tensor on the CPU, copied; all ranks that have parts of it call this."""
    if isinstance(tensor, OwnedTensor):
        assert group is not None
        return tensor.whole(group).cpu()
    if is_dtensor(tensor):
        return tensor.full_tensor().cpu().clone()  # type: ignore[attr-defined]
    return tensor.detach().cpu().clone()
