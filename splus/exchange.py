"""Communication of a step, in two visible phases: gradients to the owners of matrices, updates to the holders."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from splus.ownership import Matrix, Message, Ownership, Route


@dataclass(frozen=True)
class Arrival:
    """Entries ``message.box`` of the matrix's parameter, seen as (stack, rows, columns)."""

    message: Message
    values: Tensor


class Transfer:
    """Entries on their way, all of one dtype; what a rank sends to itself does not leave it."""

    def __init__(self, route: Route, rank: int, own: list[Tensor], received: Tensor, sizes: list[int]) -> None:
        self._route, self._rank = route, rank
        # Contiguous as what arrives from others is, so that every rank adds it up in the same way.
        self._own = [piece.contiguous() for piece in own]
        self._received, self._sizes = received, sizes
        self._works: list[dist.Work] = []
        self._sent: Tensor | None = None

    @classmethod
    def to_each(
        cls, route: Route, rank: int, values: list[list[Tensor]], like: Tensor, group: dist.ProcessGroup | None
    ) -> "Transfer":
        """One all-to-all: ``values`` are what each rank is sent."""
        send_sizes, receive_sizes = _travelling_sizes(route, rank)
        travelling = [piece.reshape(-1) for target, pieces in enumerate(values) if target != rank for piece in pieces]
        transfer = cls(route, rank, values[rank], like.new_empty(sum(receive_sizes)), receive_sizes)
        transfer._sent = torch.cat(travelling) if travelling else like.new_empty(0)
        work = dist.all_to_all_single(
            transfer._received, transfer._sent, receive_sizes, send_sizes, group=group, async_op=True
        )
        assert work is not None
        transfer._works = [work]
        return transfer

    @classmethod
    def to_all(
        cls, route: Route, rank: int, values: list[Tensor], like: Tensor, group: dist.ProcessGroup | None
    ) -> "Transfer":
        """The same ``values`` to every rank, which are put together once and not once for each."""
        send_sizes, receive_sizes = _travelling_sizes(route, rank)
        transfer = cls(route, rank, values, like.new_empty(sum(receive_sizes)), receive_sizes)
        transfer._sent = torch.cat([piece.reshape(-1) for piece in values]) if values else like.new_empty(0)
        operations = []
        for other, place in enumerate(transfer._received.split(receive_sizes)):
            peer = other if group is None else dist.get_global_rank(group, other)
            if send_sizes[other]:
                operations.append(dist.P2POp(dist.isend, transfer._sent, peer, group))
            if receive_sizes[other]:
                operations.append(dist.P2POp(dist.irecv, place, peer, group))
        transfer._works = dist.batch_isend_irecv(operations) if operations else []
        return transfer

    def arrivals(self) -> Iterator[Arrival]:
        """Wait, and go through what has come, from this rank itself too."""
        for work in self._works:
            work.wait()
        from_ranks = self._received.split(self._sizes)
        for rank, messages in enumerate(self._route.received):
            if rank == self._rank:
                yield from (Arrival(message, piece) for message, piece in zip(messages, self._own))
                continue
            pieces = from_ranks[rank].split([message.box.numel for message in messages])
            for message, piece in zip(messages, pieces):
                yield Arrival(message, piece.view(message.box.sizes))


def _travelling_sizes(route: Route, rank: int) -> tuple[list[int], list[int]]:
    """Entries that leave to and come from each rank but this one."""
    send_sizes, receive_sizes = route.send_sizes, route.receive_sizes
    send_sizes[rank] = receive_sizes[rank] = 0
    return send_sizes, receive_sizes


class Exchange:
    """Moves entries of matrices between the ranks of a process group.

    Every rank calls the same methods with the same parameters in the same order.

    Args:
        ownership: of the matrices among the ranks of ``group``.
        group: the process group; None for the default one.
    """

    def __init__(self, ownership: Ownership, group: dist.ProcessGroup | None = None) -> None:
        self.ownership = ownership
        self.group = group
        self.rank = dist.get_rank(group)
        self._routes: dict[frozenset[int], tuple[Route, Route]] = {}

    def send_gradients(self, held: Mapping[int, Tensor], like: Tensor) -> Transfer:
        """Phase 1: gradients set off to the owners of their matrices.

        Args:
            held: by parameter, what this rank holds of its gradient, (stack, rows, columns) of its box; any empty
                tensor where it holds nothing.
            like: gives the dtype in which gradients travel, and the device.
        """
        route, _ = self._route(frozenset(held))
        values = [
            [held[message.matrix.parameter][self.place(message)].to(like.dtype) for message in messages]
            for messages in route.sent
        ]
        return Transfer.to_each(route, self.rank, values, like, self.group)

    def gradients(self, transfer: Transfer, parameters: Collection[int], like: Tensor) -> dict[Matrix, Tensor]:
        """The whole gradients (m, n) of the matrices that this rank owns, when they have come."""
        whole = {
            matrix: like.new_empty(self.ownership.box(matrix).sizes)
            for matrix in self.ownership.of(self.rank)
            if matrix.parameter in parameters
        }
        for arrival in transfer.arrivals():
            message = arrival.message
            whole[message.matrix][message.box.within(self.ownership.box(message.matrix))] = arrival.values
        return {matrix: gradient[0] for matrix, gradient in whole.items()}

    def send_updates(self, computed: Mapping[Matrix, Tensor], parameters: Collection[int], like: Tensor) -> Transfer:
        """Phase 2: the updates (m, n) of this rank's matrices set off to whoever holds their entries.

        Args:
            parameters: those that have been passed to :meth:`send_gradients`.
        """
        _, route = self._route(frozenset(parameters))

        def values(messages: list[Message]) -> list[Tensor]:
            return [
                computed[message.matrix].unsqueeze(0)[message.box.within(self.ownership.box(message.matrix))]
                for message in messages
            ]

        if self.ownership.replicated:
            return Transfer.to_all(route, self.rank, values(route.sent[self.rank]), like, self.group)
        return Transfer.to_each(route, self.rank, [values(messages) for messages in route.sent], like, self.group)

    def place(self, message: Message) -> tuple[slice, slice, slice]:
        """Where a message's entries lie in what this rank holds of the parameter."""
        held = self.ownership.held[message.matrix.parameter][self.rank]
        assert held is not None, "a message is about entries that its sender and receiver hold"
        return message.box.within(held)

    def _route(self, parameters: frozenset[int]) -> tuple[Route, Route]:
        if parameters not in self._routes:
            routes = (
                self.ownership.gradient_route(self.rank, parameters),
                self.ownership.update_route(self.rank, parameters),
            )
            self._routes = {parameters: routes}  # one at a time: the same parameters step most of the time
        return self._routes[parameters]
