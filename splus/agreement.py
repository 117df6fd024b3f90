"""What ranks agree on before a step: that their plans are the same, and which gradients all of them can use."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from splus.books import GroupBooks
from splus.teams import Team, local


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
    all_books: Sequence[GroupBooks], sizes: Sequence[Mapping[int, float]], failed: bool
) -> list[dict[int, Agreed]]:
    """For each group, what its ranks know of the gradients of shared parameters that one of them has, by position.

    One small all-reduce for each team, which every rank of it takes part in.

    Args:
        sizes: norms of what this rank has of the gradients. The size agreed on is that of the whole.
        failed: whether this rank is about to raise.

    Raises:
        RuntimeError: another rank is about to raise.
    """
    agreed: list[dict[int, Agreed]] = [{} for _ in all_books]
    for team, members in _members(all_books).items():
        rows = [[float(failed), 0.0, 0.0]]
        for index, position in members:
            parameter = all_books[index].parameters[position]
            holds, size = local(parameter).numel() > 0, sizes[index].get(position)
            square = 0.0 if size is None else size * size / team.copies(parameter)
            rows.append([square, holds and size is not None, holds and size is None])
        index, position = members[0]
        (failures, *_), *rows = _sum(rows, team, all_books[index].kinds[position][1])
        if failures and not failed:
            raise RuntimeError("Another rank has raised before this step; its own message says why.")
        for (index, position), (square, present, missing) in zip(members, rows):
            if present:
                agreed[index][position] = Agreed(math.sqrt(square), missing=missing > 0)
    return agreed


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
