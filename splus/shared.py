"""The step of matrices that ranks share: gradients to owners, updates to holders, factors and bases meanwhile."""

import torch
from torch import Tensor

from splus.batches import Batch
from splus.buckets import Bucket
from splus.exchange import Exchange, Transfer
from splus.ownership import Matrix
from splus.phases import Group, Prepared, State, apply_updates, batch_gradients, refresh_bucket, step_size
from splus.teams import local
from splus.workspace import Workspace


def step_shared(group: Group, prepared: Prepared, state: State, workspace: Workspace) -> None:
    """Update a group's parameters that ranks share, bucket by bucket; all of their ranks call this.

    While a bucket is computed, the gradients of the next one travel; while its updates travel, its factors and the
    bases that are due are renewed.
    """
    waiting = [SharedStep(group, prepared, *shared, workspace) for shared in prepared.shared]
    waiting = [step for step in waiting if step.stepped]
    for step, following in zip(waiting, [*waiting[1:], None]):
        step.send_gradients()
        if following is not None:
            following.send_gradients()
        step.receive_gradients()
        step.send_updates()
        step.accumulate_factors()
        refresh_bucket(group, prepared.books, step.bucket, state, step.stepped)
        step.receive_updates()


class SharedStep:
    """One step of a bucket whose matrices have owners, of which this rank is one.

    Attributes:
        stepped: positions of the bucket's parameters that take this step, the same on every rank.
    """

    def __init__(
        self,
        group: Group,
        prepared: Prepared,
        bucket: Bucket,
        exchange: Exchange,
        batches: list[Batch],
        workspace: Workspace,
    ) -> None:
        self.group, self.prepared, self.workspace = group, prepared, workspace
        self.bucket, self.exchange, self.batches = bucket, exchange, batches
        self.stepped = {slot.parameter for slot in bucket.plan.slots if slot.parameter in prepared.gradients}
        self._gradients_out: Transfer | None = None

    def send_gradients(self) -> None:
        """Communicates: what this rank holds of the gradients goes to the owners. Once, whoever calls it again."""
        if self._gradients_out is None:
            held = {i: self._as_matrices(i, self.prepared.gradients[i]) for i in sorted(self.stepped)}
            self._gradients_out = self.exchange.send_gradients(held, self._travelling)

    def receive_gradients(self) -> None:
        """Communicates: waits for the gradients of this rank's matrices."""
        assert self._gradients_out is not None
        self._gradients = self.exchange.gradients(self._gradients_out, self._travelling)
        self._gradients_out = None
        for position in self.stepped:
            self.prepared.begin(position, self.group["betas"])

    def send_updates(self) -> None:
        """The directions of this rank's matrices; communicates: they go to all ranks that hold entries of them."""
        computed: dict[Matrix, Tensor] = {}
        for batch in self.batches:
            G = self._batch_gradients(batch)
            self.bucket.take_in(G, batch.run, self.group["betas"][0])
            U = self.bucket.direction(batch.run, self.group["eps"], self.group["normalization_decay"], self.workspace)
            computed |= zip(_matrices(batch), U.clone())
        stack = self.bucket.stacks["momentum"]
        self._updates_out = self.exchange.send_updates(computed, self.stepped, stack.new_empty(0))

    def accumulate_factors(self) -> None:
        """The gradients enter the factors of this rank's matrices."""
        for batch in self.batches:
            self.bucket.accumulate(self._batch_gradients(batch), batch.run, self.group["betas"][1])
        self._gradients.clear()

    def receive_updates(self) -> None:
        """Communicates: waits for the updates of what this rank holds; weights, averages and decay."""
        targets: list[Tensor] = []
        averages: list[Tensor] = []
        updates: list[Tensor] = []
        steps: list[int] = []
        for arrival in self._updates_out.arrivals():
            position, place = arrival.message.matrix.parameter, self.exchange.place(arrival.message)
            of = self.prepared.states[position]
            targets.append(self._as_matrices(position, self.prepared.weights[position])[place])
            averages.append(self._as_matrices(position, local(of["average"]))[place])
            updates.append(arrival.values)
            steps.append(of["step"])
        if updates:
            apply_updates(self.group, step_size(self.group, self.bucket), targets, averages, updates, steps)

    def _batch_gradients(self, batch: Batch) -> Tensor:
        given = [self._gradients[matrix].unsqueeze(0) for matrix in _matrices(batch)]
        return batch_gradients(self.group, self.prepared, batch, given, self.workspace)

    def _as_matrices(self, position: int, tensor: Tensor) -> Tensor:
        """What this rank holds of something of a parameter's shape as (stack, rows, columns); empty if that is none."""
        box = self.exchange.ownership.held[position][self.exchange.rank]
        return tensor if box is None else tensor.reshape(box.sizes)

    @property
    def _travelling(self) -> Tensor:
        """An empty tensor of the dtype in which gradients travel: the parameters' own if they have the same."""
        dtypes = {self.prepared.books.kinds[slot.parameter][0] for slot in self.bucket.plan.slots}
        plan = self.bucket.plan
        return torch.empty(0, dtype=dtypes.pop() if len(dtypes) == 1 else plan.dtype, device=plan.device)


def _matrices(batch: Batch) -> list[Matrix]:
    """Which matrices those of a batch are, in their order."""
    return [
        Matrix(piece.slot.parameter, piece.slot.part, index)
        for piece in batch.pieces
        for index in piece.slot.indices[piece.of_slot]
    ]
