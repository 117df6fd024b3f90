"""Which matrices share a bucket, and on which step each refreshes. Made once for a group, from shapes alone.

parameters           parts                    buckets
qkv   (3d, d) ──── 3 of (d, d) ───┬──────── (d, d):   q k v o      every bucket is one batch, a few products
out    (d, d) ──── 1 of (d, d) ───┘                                 a step whatever the number of layers
up    (4d, d) ──── 1 of (4d, d) ─────────── (4d, d):  up
down  (d, 4d) ──── 1 of (d, 4d) ─────────── (d, 4d):  down
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from splus.matrices import MatrixLayout


@dataclass(frozen=True)
class Slot:
    """``count`` matrices from ``start`` on in a bucket: part ``part`` of the group's parameter ``parameter``."""

    parameter: int
    part: int
    start: int
    count: int

    @property
    def matrices(self) -> range:
        """Their positions in the bucket."""
        return range(self.start, self.start + self.count)


@dataclass(frozen=True)
class BucketPlan:
    """``size`` matrices of m×n, stepped and refreshed as one batch; ``scale`` as in :class:`~splus.matrices.Part`."""

    m: int
    n: int
    rotate_left: bool
    rotate_right: bool
    scale: float | None
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return sum(slot.count for slot in self.slots)


def plan_buckets(
    layouts: Mapping[int, MatrixLayout], dtypes: Mapping[int, torch.dtype], devices: Mapping[int, torch.device]
) -> list[BucketPlan]:
    """Collect the parts of a group's parameters (by their position in the group) that can be one batch.

    Args:
        layouts, dtypes, devices: of the parameters that are whitened; the dtype is that of their state.
    """
    buckets: dict[BucketPlan, list[Slot]] = {}
    for parameter, layout in layouts.items():
        for index, part in enumerate(layout.parts):
            kind = BucketPlan(
                m=part.m,
                n=part.n,
                rotate_left=part.rotate_left,
                rotate_right=part.rotate_right,
                scale=part.scale,
                dtype=dtypes[parameter],
                device=devices[parameter],
                slots=(),
            )
            slots = buckets.setdefault(kind, [])
            start = slots[-1].start + slots[-1].count if slots else 0
            slots.append(Slot(parameter, index, start, layout.count(part)))
    return [replace(kind, slots=tuple(slots)) for kind, slots in buckets.items()]


def refresh_offsets(layouts: Mapping[int, MatrixLayout], period: int, spread: bool) -> dict[int, int]:
    """By how many steps each parameter's periodic refresh comes early, so that no step pays for all of them.

    Longest first onto the step of the period with the least work so far; ties go to the earlier parameter and step.
    The work of a refresh grows with the cubes of the rotated sides.
    """
    if not spread:
        return dict.fromkeys(layouts, 0)
    work = {parameter: _refresh_work(layout) for parameter, layout in layouts.items()}
    loads = [(0, offset) for offset in range(period)]
    offsets: dict[int, int] = {}
    for parameter in sorted(layouts, key=lambda p: (-work[p], p)):
        load, offset = heapq.heappop(loads)
        offsets[parameter] = offset
        heapq.heappush(loads, (load + work[parameter], offset))
    return offsets


def _refresh_work(layout: MatrixLayout) -> int:
    return sum(
        layout.count(part) * (part.rotate_left * part.m**3 + part.rotate_right * part.n**3) for part in layout.parts
    )
