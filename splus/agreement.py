"""What ranks agree on before a step: the same plans and options, and which gradients all of them can use."""

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from splus.books import GroupBooks
from splus.teams import Team, is_dtensor, local

# How much the norms of one gradient may differ between ranks, relatively: devices of several kinds round differently.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a parameter's gradient: its size, see :func:`agree`; and whether some lack it."""

    size: float
    missing: bool


def check_plans(all_books: Sequence[GroupBooks]) -> None:
    """Raise on every rank if the ranks of a team have planned for different parameters or options."""
    for team, members in _members(all_books).items():
        plan = [(index, position, all_books[index].sharing.plan_of(position)) for index, position in members]
        digest = hashlib.sha256(repr(plan).encode()).hexdigest()
        digests: list[str] = [""] * len(team.ranks)
        dist.all_gather_object(digests, digest, group=team.group)
        if len(set(digests)) > 1:
            others = [rank for rank, other in zip(team.ranks, digests) if other != digests[0]]
            raise RuntimeError(
                f"Ranks {others} have made SPlus with other parameters or options than rank {team.ranks[0]}: make the "
                "same model and the same groups, in the same order, on every rank."
            )


def agree(
    all_books: Sequence[GroupBooks],
    options: Sequence[Mapping[str, Any]],
    sizes: Sequence[Mapping[int, float]],
    failed: bool,
) -> list[dict[int, Agreed]]:
    """For each group, what its ranks know of the gradients of shared parameters that one of them has, by position.

    One small all-reduce for each team, which every rank of it takes part in.

    Args:
        options: of each group, which must be the same on all ranks.
        sizes: norms of what this rank has of the gradients. The size agreed on is that of the whole.
        failed: whether this rank is about to raise.

    Raises:
        RuntimeError: on every rank: another is about to raise, or they differ in options, or in the gradients of
            what all of them hold whole.
    """
    agreed: list[dict[int, Agreed]] = [{} for _ in all_books]
    for team, members in _members(all_books).items():
        of_team = {index: _plain(options[index]) for index in sorted({index for index, _ in members})}
        mark = zlib.crc32(repr(of_team).encode()) & 0xFFFF  # of 16 bits: its sum and that of its square are exact
        rows = [[float(failed), mark, mark**2, 0.0]]
        for index, position in members:
            parameter = all_books[index].parameters[position]
            holds, size = local(parameter).numel() > 0, sizes[index].get(position)
            known = 0.0 if size is None else size
            square = known * known / all_books[index].sharing.copies[position]
            rows.append([square, known, holds and size is not None, holds and size is None])
        index, position = members[0]
        (failures, marks, squares, _), *rows = _sum(rows, team, all_books[index].kinds[position][1])
        if failures:
            if failed:
                continue
            raise RuntimeError("Another rank has raised before this step; its own message says why.")
        if int(marks) ** 2 != len(team.ranks) * int(squares):
            _raise_for_options(of_team, team)
        for (index, position), (square, total, present, missing) in zip(members, rows):
            if present:
                agreed[index][position] = Agreed(math.sqrt(square), missing=missing > 0)
            if not missing and not is_dtensor(all_books[index].parameters[position]):
                _check_reduced(all_books[index].names[position], square, total / len(team.ranks), team)
    return agreed


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose text is the same where they are."""
    return {name: float(value) if isinstance(value, Tensor) else value for name, value in sorted(options.items())}


def _raise_for_options(options: Mapping[int, Mapping[str, Any]], team: Team) -> None:
    """Say which options of a team's groups differ; communicates."""
    found: list[Any] = [None] * len(team.ranks)
    dist.all_gather_object(found, options, group=team.group)
    differing = [
        f"{name} of group {index}: {', '.join(str(of_rank[index][name]) for of_rank in found)}"
        for index, of_group in options.items()
        for name in of_group
        if len({repr(of_rank[index][name]) for of_rank in found}) > 1
    ]
    raise RuntimeError(
        f"Ranks {list(team.ranks)} have different options of SPlus: {'; '.join(differing)}. Set the same on every "
        "rank; a scheduler that follows a loss, such as ReduceLROnPlateau, needs the loss averaged over ranks."
    )


def _check_reduced(name: str, square: float, mean: float, team: Team) -> None:
    """Raise for a parameter that all ranks hold whole whose gradient has not one size on all of them.

    Args:
        square, mean: the means over the ranks of the square of the size and of the size.
    """
    if math.isfinite(square) and square - mean * mean > ROUNDING**2 * square:
        raise RuntimeError(
            f"Ranks {list(team.ranks)} share the work on {name} and have different gradients of it. Average gradients "
            "over these ranks before step(), as DistributedDataParallel does and fully_shard does not for its "
            "ignored_params; leave process_group out for ranks that train on their own."
        )


def _members(all_books: Sequence[GroupBooks]) -> dict[Team, list[tuple[int, int]]]:
    """Group and position of the parameters of each team, in the order that all ranks have them in."""
    members: dict[Team, list[tuple[int, int]]] = {}
    for index, books in enumerate(all_books):
        for position, team in books.sharing.teams.items():
            members.setdefault(team, []).append((index, position))
    return members


def _sum(rows: Sequence[Sequence[float]], team: Team, device: torch.device) -> list[list[float]]:
    """The sum of each number over the team."""
    numbers: Tensor = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(numbers, group=team.group)
    total: list[list[float]] = numbers.tolist()
    return total
