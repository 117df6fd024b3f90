"""Which ranks share the parameters of a group, and who owns which of their matrices."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from splus.exchange import Exchange
from splus.matrices import MatrixLayout
from splus.ownership import Matrix, Ownership, own
from splus.plan import BucketPlan
from splus.teams import Team, Teams

Owners = Mapping[Tensor, Mapping[Matrix, int]]


@contextmanager
def _named(name: str) -> Iterator[None]:
    """A ValueError raised inside says which parameter it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class Sharing:
    """The teams of a group's parameters, which go by their position in the group, and the owners of their matrices.

    Args:
        layouts: of the whitened parameters.
        turns, period: of refreshes.
        owned: owners that parameters have already, which stay.

    Attributes:
        teams: of the parameters that ranks share.
        copies: how many ranks hold what this rank holds of each of these.
        ownerships: of each distinct team.
    """

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        names: Mapping[int, str],
        layouts: Mapping[int, MatrixLayout],
        turns: Mapping[int, int],
        period: int,
        teams: Teams,
        owned: Owners,
    ) -> None:
        self._parameters, self._names, self._layouts = parameters, names, layouts
        self._turns, self._period = turns, period
        self.teams: dict[int, Team] = {}
        for position, parameter in parameters.items():
            with _named(names[position]):
                team = teams.of(parameter)
                if team is not None:
                    team.check(parameter)
                    self.teams[position] = team
        self.copies = {position: team.copies(parameters[position]) for position, team in self.teams.items()}
        self.ownerships = {team: self._own(team, owned) for team in dict.fromkeys(self.teams.values())}

    def _own(self, team: Team, owned: Owners) -> Ownership:
        layouts = {i: layout for i, layout in self._layouts.items() if self.teams.get(i) is team}
        held, kept = {}, {}
        for position, layout in layouts.items():
            parameter = self._parameters[position]
            with _named(self._names[position]):
                held[position] = team.held(parameter, layout)
            for matrix, owner in owned.get(parameter, {}).items():
                kept[replace(matrix, parameter=position)] = owner
        return own(layouts, held, team.loads, self._period, self._turns, kept)

    def team_numbers(self) -> dict[int, int]:
        """The number of each shared parameter's team among the distinct ones."""
        numbers = {team: number for number, team in enumerate(self.ownerships)}
        return {position: numbers[team] for position, team in self.teams.items()}

    def owned_here(self) -> dict[tuple[int, int], list[int]]:
        """By shared parameter and part, the matrices that this rank owns."""
        return {
            key: found for team, of_team in self.ownerships.items() for key, found in of_team.indices(team.rank).items()
        }

    def exchange(self, plan: BucketPlan) -> Exchange | None:
        """What moves the matrices of a bucket; None if they are of this process alone."""
        if plan.team is None:
            return None
        team, ownership = list(self.ownerships.items())[plan.team]
        return Exchange(ownership.restricted({(slot.parameter, slot.part) for slot in plan.slots}), team.group)

    def plan_of(self, position: int) -> tuple[object, ...]:
        """What all ranks that share a parameter must have planned alike."""
        parameter = self._parameters[position]
        owners = [owner for matrix, owner in self._owners() if matrix.parameter == position]
        return self._names[position], tuple(parameter.shape), parameter.dtype, self._layouts.get(position), owners

    def by_parameter(self) -> dict[Tensor, Team]:
        """The parameters that ranks share, and which."""
        return {self._parameters[position]: team for position, team in self.teams.items()}

    def owners(self) -> dict[Tensor, dict[Matrix, int]]:
        """Who owns the matrices of each shared parameter."""
        found: dict[Tensor, dict[Matrix, int]] = {}
        for matrix, owner in self._owners():
            found.setdefault(self._parameters[matrix.parameter], {})[matrix] = owner
        return found

    def _owners(self) -> list[tuple[Matrix, int]]:
        return [item for ownership in self.ownerships.values() for item in ownership.owners.items()]
