"""The gradients of a step: which are usable, how large they are, and the power of two that makes their squares safe.

Squares of fp32 gradients overflow above 1e19 and vanish below 1e-23. The rule does not depend on their scale, so that
a parameter's momentum and factors may be those of G / 2ᵏ, with k = 0 for gradients of ordinary size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from splus.agreement import agree
from splus.arguments import check_gradient, check_not_replaced, check_unchanged
from splus.books import GroupBooks
from splus.precision import state_dtype
from splus.teams import held_gradient, local

# k = 0 for gradients of a norm within 2**±40 (1e-12 to 1e12): there the squares of what is 2**-20 of the norm are
# normal fp32 numbers, and 2**24 entries of the largest squares add up to 2**104. Beyond, k is a multiple of 8.
ORDINARY = 40
STRIDE = 8

FAULTS = {
    "not finite": (
        "A gradient that is not finite skips the update",
        "Lower the learning rate, clip gradients, or look for the batch that overflows.",
    ),
    "missing": (
        "A gradient that some ranks have and others lack skips the update",
        "Reduce gradients so that every rank has them, zero where it had none.",
    ),
}


def usable_gradients(
    all_books: Sequence[GroupBooks], options: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[int, Tensor]], list[dict[int, float]]]:
    """For each group, its finite gradients and their sizes, by position; nothing has been changed if this raises.

    Of parameters that ranks share, what this rank holds of them: all ranks have the same positions and sizes.
    """
    try:
        gradients = [_given_gradients(books) for books in all_books]
        sizes = [gradient_sizes(found) for found in gradients]
    except Exception:
        agree(all_books, options, [{} for _ in all_books], failed=True)
        raise
    all_agreed = agree(all_books, options, sizes, failed=False)
    for books, found, of_group, agreed in zip(all_books, gradients, sizes, all_agreed):
        for position, common in agreed.items():
            of_group[position] = math.nan if common.missing else common.size
            found.setdefault(position, local(books.parameters[position]))
        for position, size in of_group.items():
            if math.isfinite(size):
                books.gradient_faults.clear(position)
                continue
            del found[position]
            what, advice = FAULTS["missing" if position in agreed and agreed[position].missing else "not finite"]
            books.gradient_faults.report(position, books.names[position], what, advice)
    return gradients, sizes


def _given_gradients(books: GroupBooks) -> dict[int, Tensor]:
    """The gradients there are, as this rank holds them.

    Raises:
        RuntimeError: one is sparse, or its parameter has been cast, moved or replaced.
    """
    found = {}
    for position, parameter in books.parameters.items():
        check_not_replaced(parameter, books.names[position])
        if parameter.grad is None or not parameter.numel():
            continue
        check_unchanged(parameter, books.names[position], *books.kinds[position])
        check_gradient(parameter.grad, books.names[position])
        found[position] = held_gradient(parameter)
    return found


def gradient_sizes(gradients: Mapping[int, Tensor]) -> dict[int, float]:
    """The norm of each gradient, or its largest entry where squares may be out of range; not finite if it is not.

    One synchronisation, and one more if there are gradients that are zero or beyond 2**±40.
    """
    sizes = _norms(gradients, 2)
    extreme = {i: gradients[i] for i, norm in sizes.items() if norm < 2.0**-ORDINARY or norm > 2.0**ORDINARY}
    return sizes | _norms(extreme, math.inf)


def _norms(tensors: Mapping[int, Tensor], order: float) -> dict[int, float]:
    """The norm of this order of each tensor, computed in the dtype of its state; 0 for an empty one."""
    norms = dict.fromkeys(tensors, 0.0)
    filled = {i: tensor for i, tensor in tensors.items() if tensor.numel()}
    for dtype in {state_dtype(tensor.dtype) for tensor in filled.values()}:
        chosen = {i: tensor for i, tensor in filled.items() if state_dtype(tensor.dtype) == dtype}
        found = torch._foreach_norm(list(chosen.values()), order, dtype)
        norms |= zip(chosen, torch.stack([norm.to(found[0].device) for norm in found]).tolist())
    return norms


def scale_exponent(peak: float, dtype: torch.dtype) -> int:
    """k, with which the momentum and the factors of gradients up to ``peak`` are those of G / 2ᵏ."""
    exponent = math.frexp(peak)[1]
    if abs(exponent) <= ORDINARY:
        return 0
    limit = math.frexp(torch.finfo(dtype).max)[1] - STRIDE
    return max(-limit, min(limit, STRIDE * round(exponent / STRIDE)))


def follow_size(state: dict[str, Any], size: float, betas: tuple[float, float]) -> int:
    """Take a gradient's size into ``state["peak"]``, what the state remembers of the largest; return k.

    The peak decays as the slower of the momentum and of the root of the factors, but not under a gradient of zero, so
    that the momentum fades from fp32's range then. Where k changes, momentum and factors are rescaled in place, which
    is exact.
    """
    dtype = state["average"].dtype
    before = scale_exponent(state["peak"], dtype)
    if size == 0:
        return before
    state["peak"] = max(size, max(betas[0], math.sqrt(betas[1])) * state["peak"])
    after = scale_exponent(state["peak"], dtype)
    if after != before:
        for name, value in state.items():
            power = 1 if name.startswith(("momentum", "recent_norm")) else 2 if name.startswith("factor") else 0
            if power:
                # What a larger power would have to undo has decayed to nothing, by betas near zero.
                value.mul_(2.0 ** min(power * (before - after), 100))
    return after
