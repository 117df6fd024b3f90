"""The phases of a step of a parameter group: directions, weights and averages, factors, refreshes."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from splus.averaging import update_averages
from splus.batches import Batch, bucket_batches, elementwise_batches, matrix_batches
from splus.books import GroupBooks
from splus.buckets import Bucket
from splus.eigenbasis import Method
from splus.gradients import follow_size
from splus.plan import Slot
from splus.precision import full_precision
from splus.scaling import elementwise_step
from splus.teams import local
from splus.update import mean_scale, shrink, sign_from, soft_sign
from splus.workspace import Workspace

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]


class Prepared:
    """All that a step of a group needs memory for, ready before anything is changed.

    Args:
        gradients, sizes: by position in the group; gradients as this rank holds them.

    Attributes:
        states: of the parameters that have a gradient.
        weights: what the step updates, see :func:`_working_weights`.
        rows, batches: what is stepped together, of the elementwise and of the whitened parameters that are not shared.
        shared: the buckets that are, what moves their matrices, and batches of this rank's.
        exponents: of the whitened parameters that have begun their step, see :func:`~splus.gradients.follow_size`.
    """

    def __init__(
        self,
        books: GroupBooks,
        state: State,
        gradients: Mapping[int, Tensor],
        sizes: Mapping[int, float],
        workspace: Workspace,
    ) -> None:
        self.books, self.gradients, self.sizes = books, gradients, sizes
        self.states = {position: state[books.parameters[position]] for position in gradients}
        self.weights = {position: _working_weights(books, position, of) for position, of in self.states.items()}
        self.rows = elementwise_batches(books, gradients)
        self.batches = matrix_batches(books, gradients)
        self.shared = [
            (bucket, exchange, bucket_batches(bucket, gradients))
            for bucket, exchange in zip(books.buckets, books.exchanges)
            if exchange is not None
        ]
        self.exponents: dict[int, int] = {}
        self._counts = {position: of["step"] + 1 for position, of in self.states.items()}
        for rows in self.rows:
            _like([_rows(local(self.states[position]["momentum"]), chosen) for position, chosen in rows], workspace)
        for batch in chain(self.batches, *(batches for *_, batches in self.shared)):
            batch.bucket.reserve(batch.run, workspace)

    @contextmanager
    def written_back(self) -> Iterator[None]:
        """What has been updated inside is in the parameters afterwards, whatever is raised."""
        try:
            yield
        finally:
            for position, updated in self.weights.items():
                parameter = local(self.books.parameters[position])
                if updated is not parameter:
                    parameter.copy_(updated)

    def begin(self, position: int, betas: tuple[float, float]) -> None:
        """Count the step of a parameter, and follow the size of a whitened one, with the first of its batches."""
        of = self.states[position]
        if of["step"] != self._counts[position]:
            of["step"] = self._counts[position]
            if position in self.books.layouts:
                self.exponents[position] = follow_size(of, self.sizes[position], betas)


def step_group(group: Group, prepared: Prepared, workspace: Workspace) -> None:
    """Update the parameters of a group that have a gradient, and their factors, a batch at a time.

    Whatever is raised on the way, parameters of finished batches have taken the whole step, and those of batches that
    were not begun none of it. Matrices that ranks share are left to :func:`~splus.shared.step_shared`.
    """
    for rows in prepared.rows:
        _step_elementwise(group, prepared, rows, workspace)
    for batch in prepared.batches:
        _step_matrices(group, prepared, batch, workspace)
    for position in prepared.gradients:
        if position not in prepared.books.layouts:
            prepared.begin(position, group["betas"])  # also where this rank holds no rows


def _step_elementwise(
    group: Group,
    prepared: Prepared,
    rows: list[tuple[int, slice | None]],
    workspace: Workspace,
) -> None:
    """Parameters that are not whitened move by lr · scale · sign(M), or its soft sign."""
    states = [prepared.states[position] for position, _ in rows]
    shape = prepared.books.parameters[rows[0][0]].shape  # the whole batch has rows of this length
    scale = elementwise_step(shape, group["elementwise_scale"], group["width_power"])
    momenta = [_rows(local(of["momentum"]), chosen) for of, (_, chosen) in zip(states, rows)]
    flat, updates, scratch, pieces = _like(momenta, workspace)
    torch._foreach_copy_(updates, [_rows(prepared.gradients[position], chosen) for position, chosen in rows])
    if group["maximize"]:
        torch._foreach_neg_(updates)
    for position, _ in rows:
        prepared.begin(position, group["betas"])
    torch._foreach_lerp_(momenta, updates, 1 - group["betas"][0])
    torch._foreach_copy_(updates, momenta)
    # Decay never takes a denormal number to zero: rounding keeps it, and its sign would step for ever.
    least, decay = torch.finfo(flat.dtype).tiny, group["normalization_decay"]
    if decay:
        recent = [_rows(local(of["recent_norm"]), chosen) for of, (_, chosen) in zip(states, rows)]
        shrink(flat, least, scratch)
        torch._foreach_copy_(pieces, recent)
        soft_sign(flat, scratch, decay)
        torch._foreach_copy_(recent, pieces)
        torch._foreach_mul_(updates, [mean_scale(decay, of["step"]) for of in states])
    else:
        sign_from(flat, least)
    apply_updates(
        group,
        scale,
        [_rows(prepared.weights[position], chosen) for position, chosen in rows],
        [_rows(local(of["average"]), chosen) for of, (_, chosen) in zip(states, rows)],
        updates,
        [of["step"] for of in states],
    )


def _step_matrices(group: Group, prepared: Prepared, batch: Batch, workspace: Workspace) -> None:
    """Whitened matrices move by lr · 2/(m+n) · U; their gradients enter the factors."""
    given = []
    for piece in batch.pieces:
        layout = prepared.books.layouts[piece.slot.parameter]
        given.append(layout.split(prepared.gradients[piece.slot.parameter], piece.slot.part)[piece.of_slot])
    G = batch_gradients(group, prepared, batch, given, workspace)
    batch.bucket.take_in(G, batch.run, group["betas"][0])
    batch.bucket.accumulate(G, batch.run, group["betas"][1])
    U = batch.bucket.direction(batch.run, group["eps"], group["normalization_decay"], workspace)
    targets: list[Tensor] = []
    averages: list[Tensor] = []
    updates: list[Tensor] = []
    steps: list[int] = []
    for piece, part in zip(batch.pieces, U.split(batch.sections)):
        position, where = piece.slot.parameter, (piece.slot.part, piece.of_slot)
        layout, of = prepared.books.layouts[position], prepared.states[position]
        targets += layout.places(prepared.weights[position], *where)
        averages += layout.places(of["average"], *where)
        updates += layout.fit_places(part, *where)
        steps += [of["step"]] * (len(updates) - len(steps))
    apply_updates(group, step_size(group, batch.bucket), targets, averages, updates, steps)


def batch_gradients(
    group: Group, prepared: Prepared, batch: Batch, given: Sequence[Tensor], workspace: Workspace
) -> Tensor:
    """The gradients (b, m, n) of a batch as momentum and factors take them, in the workspace.

    Args:
        given: those of each piece (·, m, n).
    """
    G = batch.bucket.scratch(batch.run, workspace)
    torch.cat(list(given), out=G)
    for piece, part in zip(batch.pieces, G.split(batch.sections)):
        prepared.begin(piece.slot.parameter, group["betas"])
        if exponent := prepared.exponents[piece.slot.parameter]:
            part.mul_(2.0**-exponent)
    return G.neg_() if group["maximize"] else G


def step_size(group: Group, bucket: Bucket) -> float:
    """The scale of a bucket's updates, in units of the learning rate."""
    scale: float = group["elementwise_scale"] if bucket.plan.scale is None else bucket.plan.scale
    return scale


def apply_updates(
    group: Group,
    scale: float,
    weights: list[Tensor],
    averages: list[Tensor],
    updates: list[Tensor],
    steps: list[int],
) -> None:
    """Weights, averages and decay, in the order of the authors' file."""
    lr = float(group["lr"])
    scaled_lr = lr * scale
    torch._foreach_add_(weights, updates, alpha=-scaled_lr)
    update_averages(averages, weights, group["ema_decay"], steps)
    decay: float = group["weight_decay"]
    if decay:
        torch._foreach_mul_(weights, 1 - (scaled_lr if group["scale_weight_decay"] else lr) * decay)


def refresh_bases(group: Group, books: GroupBooks, state: State, stepped: Collection[int]) -> None:
    """Renew the bases that are due now, of the buckets that are not shared.

    Args:
        stepped: positions of the parameters that this step updated; the others' schedules stand still.

    Raises:
        RuntimeError: a matrix's decompositions failed too often in a row.
    """
    for bucket, exchange in zip(books.buckets, books.exchanges):
        if exchange is None:
            refresh_bucket(group, books, bucket, state, stepped)


def refresh_bucket(group: Group, books: GroupBooks, bucket: Bucket, state: State, stepped: Collection[int]) -> None:
    """Renew the bases of a bucket that are due now, together for each method."""
    started = time.perf_counter()
    schedule, turns = books.refresh_plan(group)
    due: dict[Method, list[Slot]] = {}
    for slot in bucket.plan.slots:
        step = state[books.parameters[slot.parameter]]["step"]
        if slot.parameter in stepped and schedule.due(step, turns[slot.parameter]):
            due.setdefault("eigh" if schedule.is_first(step) else group["refresh_method"], []).append(slot)
    for method, slots in due.items():
        failed = bucket.refresh([position for slot in slots for position in slot.matrices], method)
        books.refreshes += sum(slot.count for slot in slots)
        _report_failures(books, slots, failed)
    books.refresh_seconds += time.perf_counter() - started


def _report_failures(books: GroupBooks, refreshed: list[Slot], failed: set[int]) -> None:
    for slot in refreshed:
        key = (slot.parameter, slot.part)
        if failed.isdisjoint(slot.matrices):
            books.decomposition_faults.clear(key)
        else:
            books.decomposition_faults.report(
                key,
                books.names[slot.parameter] + (f", part {slot.part}" if slot.part else ""),
                "A decomposition that failed in fp32 and fp64 keeps the old eigenbasis",
                "Its factors are not finite, or the solver is at fault: scale the loss so that squared gradients "
                "are within fp32's range.",
            )


def _working_weights(books: GroupBooks, position: int, state: Mapping[str, Any]) -> Tensor:
    """What the step updates: the parameter itself, or a copy in full precision or in the order of its matrices."""
    weights = full_precision(books.parameters[position], state)
    return weights.contiguous() if books.needs_order(position) else weights


def _rows(tensor: Tensor, chosen: slice | None) -> Tensor:
    return tensor if chosen is None else tensor[chosen]


def _like(tensors: list[Tensor], workspace: Workspace) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """Two pieces of scratch memory, each flat and as tensors of the same shapes, one after the other in it."""
    sizes = [tensor.numel() for tensor in tensors]
    first, second = workspace.pair((sum(sizes),), tensors[0].dtype, tensors[0].device)
    shaped = [
        [piece.view(tensor.shape) for piece, tensor in zip(flat.split(sizes), tensors)] for flat in (first, second)
    ]
    return first, shaped[0], second, shaped[1]
