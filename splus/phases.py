"""The phases of a step of a parameter group: directions, weights and averages, factors, refreshes."""

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from splus.averaging import update_averages
from splus.books import Batch, GroupBooks, elementwise_batches, matrix_batches
from splus.eigenbasis import Method
from splus.gradients import follow_size
from splus.plan import Slot
from splus.precision import full_precision
from splus.scaling import elementwise_step
from splus.update import sign_from
from splus.workspace import Workspace

Group = Mapping[str, Any]
State = Mapping[Tensor, dict[str, Any]]


class Prepared:
    """All that a step of a group needs memory for, ready before anything is changed.

    Args:
        gradients, sizes: by position in the group; gradients in the parameter's shape and dtype.

    Attributes:
        states: of the parameters that have a gradient.
        weights: what the step updates, see :func:`_working_weights`.
        rows, batches: what is stepped together, of the elementwise and of the whitened parameters.
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
        self.exponents: dict[int, int] = {}
        self._counts = {position: of["step"] + 1 for position, of in self.states.items()}
        for rows in self.rows:
            _like([_rows(self.states[position]["momentum"], chosen) for position, chosen in rows], workspace)
        for batch in self.batches:
            batch.bucket.reserve(batch.run, workspace)

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
    were not begun none of it.
    """
    parameters = prepared.books.parameters
    try:
        for rows in prepared.rows:
            _step_elementwise(group, prepared, rows, workspace)
        for batch in prepared.batches:
            _step_matrices(group, prepared, batch, workspace)
    finally:
        for position, whole in prepared.weights.items():
            if whole is not parameters[position]:
                parameters[position].copy_(whole)


def _step_elementwise(
    group: Group,
    prepared: Prepared,
    rows: list[tuple[int, slice | None]],
    workspace: Workspace,
) -> None:
    """Parameters that are not whitened move by lr · scale · sign(M)."""
    states = [prepared.states[position] for position, _ in rows]
    shape = prepared.books.parameters[rows[0][0]].shape  # the whole batch has rows of this length
    scale = elementwise_step(shape, group["elementwise_scale"], group["width_power"])
    momenta = [_rows(of["momentum"], chosen) for of, (_, chosen) in zip(states, rows)]
    flat, updates = _like(momenta, workspace)
    torch._foreach_copy_(updates, [_rows(prepared.gradients[position], chosen) for position, chosen in rows])
    if group["maximize"]:
        torch._foreach_neg_(updates)
    for position, _ in rows:
        prepared.begin(position, group["betas"])
    torch._foreach_lerp_(momenta, updates, 1 - group["betas"][0])
    torch._foreach_copy_(updates, momenta)
    # Decay never takes a denormal number to zero: rounding keeps it, and its sign would step for ever.
    sign_from(flat, torch.finfo(flat.dtype).tiny)
    _apply(
        group,
        scale,
        [_rows(prepared.weights[position], chosen) for position, chosen in rows],
        [_rows(of["average"], chosen) for of, (_, chosen) in zip(states, rows)],
        updates,
        [of["step"] for of in states],
    )


def _step_matrices(group: Group, prepared: Prepared, batch: Batch, workspace: Workspace) -> None:
    """Whitened matrices move by lr · 2/(m+n) · U; their gradients enter the factors."""
    plan, parts = batch.bucket.plan, []
    for piece in batch.pieces:
        layout = prepared.books.layouts[piece.slot.parameter]
        parts.append(layout.split(prepared.gradients[piece.slot.parameter], piece.slot.part)[piece.of_slot])
    G = batch.bucket.scratch(batch.run, workspace)
    torch.cat(parts, out=G)
    sections = [len(part) for part in parts]
    for piece, part in zip(batch.pieces, G.split(sections)):
        prepared.begin(piece.slot.parameter, group["betas"])
        if exponent := prepared.exponents[piece.slot.parameter]:
            part.mul_(2.0**-exponent)
    if group["maximize"]:
        G.neg_()
    batch.bucket.take_in(G, batch.run, group["betas"])
    U = batch.bucket.direction(batch.run, group["eps"], workspace)
    targets: list[Tensor] = []
    averages: list[Tensor] = []
    updates: list[Tensor] = []
    steps: list[int] = []
    for piece, part in zip(batch.pieces, U.split(sections)):
        position, where = piece.slot.parameter, (piece.slot.part, piece.of_slot)
        layout, of = prepared.books.layouts[position], prepared.states[position]
        targets += layout.places(prepared.weights[position], *where)
        averages += layout.places(of["average"], *where)
        updates += layout.fit_places(part, *where)
        steps += [of["step"]] * (len(updates) - len(steps))
    scale = group["elementwise_scale"] if plan.scale is None else plan.scale
    _apply(group, scale, targets, averages, updates, steps)


def _apply(
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
    """Renew the bases that are due now, together for each bucket and method.

    Args:
        stepped: positions of the parameters that this step updated; the others' schedules stand still.

    Raises:
        RuntimeError: a matrix's decompositions failed too often in a row.
    """
    started = time.perf_counter()
    schedule, turns = books.refresh_plan(group)
    for bucket in books.buckets:
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
    parameter, layout = books.parameters[position], books.layouts.get(position)
    weights = full_precision(parameter, state)
    return weights.contiguous() if layout is not None and layout.divided else weights


def _rows(tensor: Tensor, chosen: slice | None) -> Tensor:
    return tensor if chosen is None else tensor[chosen]


def _like(tensors: list[Tensor], workspace: Workspace) -> tuple[Tensor, list[Tensor]]:
    """Scratch memory, flat and as tensors of the same shapes, one after the other in it."""
    sizes = [tensor.numel() for tensor in tensors]
    flat, _ = workspace.pair((sum(sizes),), tensors[0].dtype, tensors[0].device)
    return flat, [piece.view(tensor.shape) for piece, tensor in zip(flat.split(sizes), tensors)]
