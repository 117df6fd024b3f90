"""Communication of a step, in two visible phases: gradients to the owners of matrices, updates to the holders."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """Entries on their way, all of one dtype; what a rank sends to itself does not leave it.

    Args:
        own: what it sends to itself.
        received: where what comes from the others is put, one after the other.
        works: what is to be waited for.
        sent: is kept until then.
    """

    def __init__(
        self,
        route: Route,
        own: list[Tensor],
        received: Tensor,
        works: Sequence[dist.Work] = (),
        sent: Tensor | None = None,
    ) -> None:
        self._route, self._received, self._works, self._sent = route, received, works, sent
        # Contiguous as what arrives from others is, so that every rank adds it up in the same way.
        self._own = [piece.contiguous() for piece in own]

    def arrivals(self) -> Iterator[Arrival]:
        """Wait, and go through what has come, from this rank itself too."""
        for work in self._works:
            work.wait()
        from_ranks = self._received.split(self._route.receive_sizes)
        for rank, messages in enumerate(self._route.received):
            if rank == self._route.rank:
                yield from (Arrival(message, piece) for message, piece in zip(messages, self._own))
                continue
            pieces = from_ranks[rank].split([message.box.numel for message in messages])
            for message, piece in zip(messages, pieces):
                yield Arrival(message, piece.view(message.box.sizes))


class Exchange:
    """Moves entries of matrices between the ranks of a process group.

    Every rank calls the same methods with the same parameters in the same order.

    Args:
        ownership: of the matrices among the ranks of ``group``.
    """

    def __init__(self, ownership: Ownership, group: dist.ProcessGroup) -> None:
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
        route, _ = self._route(held)
        values = [
            [held[message.matrix.parameter][self.place(message)].to(like.dtype) for message in messages]
            for messages in route.sent
        ]
        if self.ownership.replicated:
            return Transfer(route, values[self.rank], like.new_empty(0))
        return self._to_each(route, values, like)

    def gradients(self, transfer: Transfer, like: Tensor) -> dict[Matrix, Tensor]:
        """The whole gradients (m, n) of the matrices that this rank owns, when they have come."""
        whole: dict[Matrix, Tensor] = {}
        for arrival in transfer.arrivals():
            message = arrival.message
            matrix, box = message.matrix, self.ownership.box(message.matrix)
            if message.box == box:
                whole[matrix] = arrival.values[0]
                continue
            if matrix not in whole:
                whole[matrix] = like.new_empty(box.sizes[1:])
            whole[matrix].unsqueeze(0)[message.box.within(box)] = arrival.values
        return whole

    def send_updates(self, computed: Mapping[Matrix, Tensor], parameters: Collection[int], like: Tensor) -> Transfer:
        """Phase 2: the updates (m, n) of this rank's matrices set off to whoever holds their entries.

        Args:
            parameters: those that have been passed to :meth:`send_gradients`.
        """
        _, route = self._route(parameters)

        def values(messages: list[Message]) -> list[Tensor]:
            return [
                computed[message.matrix].unsqueeze(0)[message.box.within(self.ownership.box(message.matrix))]
                for message in messages
            ]

        if self.ownership.replicated:
            return self._to_all(route, values(route.sent[self.rank]), like)
        return self._to_each(route, [values(messages) for messages in route.sent], like)

    def place(self, message: Message) -> tuple[slice, slice, slice]:
        """Where a message's entries lie in what this rank holds of the parameter."""
        held = self.ownership.held[message.matrix.parameter][self.rank]
        assert held is not None, "a message is about entries that its sender and receiver hold"
        return message.box.within(held)

    def _to_each(self, route: Route, values: list[list[Tensor]], like: Tensor) -> Transfer:
        """One all-to-all: ``values`` are what each rank is sent."""
        pieces = [piece.reshape(-1) for rank, of in enumerate(values) if rank != self.rank for piece in of]
        sent = torch.cat(pieces) if pieces else like.new_empty(0)
        received = like.new_empty(sum(route.receive_sizes))
        sizes = (route.receive_sizes, route.send_sizes)
        work = dist.all_to_all_single(received, sent, *sizes, group=self.group, async_op=True)
        assert work is not None
        return Transfer(route, values[self.rank], received, [work], sent)

    def _to_all(self, route: Route, values: list[Tensor], like: Tensor) -> Transfer:
        """The same ``values`` to every rank, which are put together once and not once for each."""
        sent = torch.cat([piece.reshape(-1) for piece in values]) if values else like.new_empty(0)
        received = like.new_empty(sum(route.receive_sizes))
        operations = []
        for rank, place in enumerate(received.split(route.receive_sizes)):
            peer = dist.get_global_rank(self.group, rank)
            if route.send_sizes[rank]:
                operations.append(dist.P2POp(dist.isend, sent, peer, self.group))
            if route.receive_sizes[rank]:
                operations.append(dist.P2POp(dist.irecv, place, peer, self.group))
        return Transfer(route, values, received, dist.batch_isend_irecv(operations) if operations else (), sent)

    @cached_property
    def _messages(self) -> tuple[list[Message], list[Message]]:
        return self.ownership.messages_of(self.rank)

    def _route(self, parameters: Collection[int]) -> tuple[Route, Route]:
        stepped = frozenset(parameters)
        if stepped not in self._routes:
            gradients, updates = (
                Route(self.rank, self.ownership.ranks, [m for m in messages if m.matrix.parameter in stepped])
                for messages in self._messages
            )
            self._routes = {stepped: (gradients, updates)}  # the same parameters step most of the time
        return self._routes[stepped]
