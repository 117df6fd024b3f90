"""Scratch memory of a step: allocated once, overwritten by whoever takes it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Two flat buffers on every device, as large as the largest batch so far.

    A step never holds more than these, whatever the number of layers. On a CPU they also save time: fresh pages for
    temporaries cost more than the elementwise arithmetic on them.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def pair(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two tensors of this shape with any content. They share their memory with those of every other call."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if device not in self._buffers or len(self._buffers[device][0]) < size:
            self._buffers.pop(device, None)  # before the larger ones are made
            self._buffers[device] = tuple(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))  # type: ignore[assignment]
        first, second = (buffer[:size].view(dtype).view(*shape) for buffer in self._buffers[device])
        return first, second
