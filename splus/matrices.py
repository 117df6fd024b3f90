"""A parameter seen as batches of matrices, and back.

A parameter is first a stack of E matrices with M rows and N columns: a 2-D weight is (1, M, N), a convolution
(out, in, *k) is (1, out, in·k), stacked experts (E, M, N) are themselves. Its rows (or columns) may be cut into
sections that are matrices of their own, as q, k and v of a fused projection; a side that is too long is cut into
blocks, which share the step size of the section they come from. Runs of equal pieces make one regular grid, a
:class:`Part`:

    fused (3d, d), split 3          sides of 5 and 3, limit 2
    ┌───┐                           ┌──┬──┬─┐
    │ q │  one part of 3 matrices   │a0│a1│b│      rows 2 + 1, columns 2 + 2 + 1:
    ├───┤  of d×d                   ├──┼──┼─┤      four parts a, b, c, d
    │ k │                           │c0│c1│d│
    ├───┤                           └──┴──┴─┘
    │ v │
    └───┘
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import Tensor

from splus.scaling import StepScale, step_scale

Oversized = Literal["blocks", "unrotated", "published"]
Sides = Literal["auto", "both", "shorter"]
Sections = int | tuple[int, ...] | None

# The longest side that "auto" rotates, in units of the shorter; LoRA factors are longer. Factor and basis of a side r
# times the other take 2 r times the memory of the matrix, and a gradient's rank is an r-th of that side.
LONGEST = 100


@dataclass(frozen=True)
class Run:
    """``count`` equal pieces of ``size`` entries in a row, from ``start`` on along one side."""

    start: int
    count: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.size


@dataclass(frozen=True)
class Part:
    """A grid of equal m×n matrices in each of the stacked matrices of a parameter.

    ``scale`` multiplies the learning rate; None stands for the group's ``elementwise_scale``.
    """

    rows: Run
    columns: Run
    rotate_left: bool
    rotate_right: bool
    scale: float | None

    @property
    def m(self) -> int:
        return self.rows.size

    @property
    def n(self) -> int:
        return self.columns.size


@dataclass(frozen=True)
class MatrixLayout:
    """How a parameter of ``shape`` is cut: ``stack`` matrices of ``rows`` by ``columns``, each into ``parts``."""

    shape: tuple[int, ...]
    stack: int
    rows: int
    columns: int
    parts: tuple[Part, ...]

    @cached_property
    def divided(self) -> bool:
        """Whether the matrices are not simply the parameter's entries in their order."""
        return len(self.parts) > 1 or self.parts[0].columns.count > 1

    def count(self, part: Part) -> int:
        """The number of matrices of ``part``."""
        return self.stack * part.rows.count * part.columns.count

    def split(self, tensor: Tensor, index: int) -> Tensor:
        """The matrices (B, m, n) of a part of a tensor of the parameter's shape: a view where the strides allow it."""
        part = self.parts[index]
        if not self.divided:
            return tensor.reshape(-1, part.m, part.n)
        return self._grid(tensor.reshape(self.stack, self.rows, self.columns), part).flatten(0, 2)

    def places(self, tensor: Tensor, index: int, chosen: slice) -> list[Tensor]:
        """Where the chosen matrices of a part lie in a tensor of the parameter's shape: views of it, to write to.

        Args:
            tensor: contiguous if the parameter is divided.
        """
        if self._is_all(index, chosen):
            return [tensor]
        grid = self._grid(tensor.view(self.stack, self.rows, self.columns), self.parts[index])
        across = itertools.product(*map(range, grid.shape[:3]))
        return [grid[at] for at in itertools.islice(across, chosen.start, chosen.stop)]

    def fit_places(self, matrices: Tensor, index: int, chosen: slice) -> list[Tensor]:
        """The chosen matrices (b, m, n) of a part in the shapes of their :meth:`places`."""
        return [matrices.view(self.shape)] if self._is_all(index, chosen) else list(matrices.unbind())

    def _is_all(self, index: int, chosen: slice) -> bool:
        return not self.divided and chosen == slice(0, self.count(self.parts[index]))

    def _grid(self, whole: Tensor, part: Part) -> Tensor:
        """(E, M, N) → a view (E, row pieces, column pieces, m, n) of ``part``."""
        region = whole[:, part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
        grid = region.unflatten(2, (part.columns.count, part.n)).unflatten(1, (part.rows.count, part.m))
        return grid.transpose(2, 3)


def matrix_layout(
    shape: Sequence[int],
    *,
    stacked: bool = False,
    split: Sections = None,
    split_dim: int = 0,
    max_side: int,
    oversized: Oversized = "blocks",
    sides: Sides = "both",
    scale_rule: StepScale = "shape",
) -> MatrixLayout:
    """Cut a parameter of ``shape`` (2 or more dimensions) into matrices.

    Args:
        stacked: all but the last two dimensions count matrices; otherwise all but the first are columns.
        split: number of equal sections, or their sizes, along ``split_dim`` (0 rows, 1 columns) of each matrix.
        max_side: the longest side that is rotated whole.
        oversized: what a longer side becomes: "blocks" of at most ``max_side``; "unrotated" (no factor and no basis on
            that side); "published", which is what the authors' file does: unrotated from ``max_side`` on, and stepping
            by the elementwise scale beyond it.
        sides: "both" are rotated, or the "shorter" alone (the rows of a square); "auto", both unless one is more than
            LONGEST times the other.
        scale_rule: how the step size follows from the sides, those of the whole matrix for its blocks.

    Raises:
        ValueError: the sections do not add up to the side, or cut columns that are several dimensions in one.
    """
    shape = tuple(shape)
    stack = math.prod(shape[:-2]) if stacked else 1
    rows, columns = (shape[-2], shape[-1]) if stacked else (shape[0], math.prod(shape[1:]))
    if split is not None and split_dim == 1 and len(shape) > 2 and not stacked:
        raise ValueError(
            f"split={split} with split_dim=1 is given for shape {shape}, whose columns are several dimensions; "
            "split its rows (split_dim=0), or set stacked=True if the leading dimensions count matrices."
        )
    runs = _runs(section_sizes((rows, columns)[split_dim], split))
    parts: list[Part] = []
    for run in runs:
        row_run, column_run = (run, Run(0, 1, columns)) if split_dim == 0 else (Run(0, 1, rows), run)
        scale = step_scale(row_run.size, column_run.size, scale_rule)
        parts += _parts_of(row_run, column_run, scale, max_side, oversized)
    if sides != "both":
        parts = [_shorter_side(part) if sides == "shorter" or _is_stretched(part) else part for part in parts]
    return MatrixLayout(shape, stack, rows, columns, tuple(parts))


def section_sizes(side: int, split: Sections) -> tuple[int, ...]:
    """The sizes of the sections that ``split`` cuts a side into."""
    if split is None:
        return (side,)
    if isinstance(split, int):
        if split < 1 or side % split:
            raise ValueError(f"split={split} is given for a side of {side}; the number of sections must divide it.")
        return (side // split,) * split
    if sum(split) != side or min(split) < 1:
        raise ValueError(
            f"split={split} is given for a side of {side}; the sections must be positive and add up to it."
        )
    return tuple(split)


def _parts_of(rows: Run, columns: Run, scale: float, max_side: int, oversized: Oversized) -> list[Part]:
    """The parts of a grid of sections: itself, or its blocks."""
    if oversized == "blocks":
        return [
            Part(row_run, column_run, True, True, scale)
            for row_run in _blocks(rows, max_side)
            for column_run in _blocks(columns, max_side)
        ]
    longest = max_side if oversized == "unrotated" else max_side - 1
    beyond = oversized == "published" and max(rows.size, columns.size) > max_side
    return [Part(rows, columns, rows.size <= longest, columns.size <= longest, None if beyond else scale)]


def _is_stretched(part: Part) -> bool:
    return max(part.m, part.n) > LONGEST * min(part.m, part.n)


def _shorter_side(part: Part) -> Part:
    return replace(
        part, rotate_left=part.rotate_left and part.m <= part.n, rotate_right=part.rotate_right and part.n < part.m
    )


def _runs(sizes: Sequence[int], start: int = 0) -> list[Run]:
    """Neighbouring pieces of equal size as one run."""
    runs: list[Run] = []
    for size in sizes:
        if runs and runs[-1].size == size:
            runs[-1] = Run(runs[-1].start, runs[-1].count + 1, size)
        else:
            runs.append(Run(start, 1, size))
        start += size
    return runs


def _blocks(run: Run, max_side: int) -> list[Run]:
    """A run of sections cut into blocks of at most ``max_side``, as even as they can be."""
    if run.size <= max_side:
        return [run]
    count = -(-run.size // max_side)
    small, larger = divmod(run.size, count)
    sizes = [small + 1] * larger + [small] * (count - larger)
    return _runs(sizes * run.count, run.start)
