"""The state of matrices of one shape, stacked, and what happens to them in a step.

The optimizer's state dict holds views into these stacks, one for each parameter.
"""

import torch
from torch import Tensor

from splus.eigenbasis import Method, refreshed_basis
from splus.matrices import MatrixLayout
from splus.plan import BucketPlan, Slot
from splus.update import accumulate_factors, whitened_direction


class Bucket:
    """B matrices of m×n: momentum (B, m, n), factors and bases (B, m, m) and (B, n, n) of the rotated sides."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.stacks: dict[str, Tensor] = {
            "momentum": torch.zeros(plan.size, plan.m, plan.n, dtype=plan.dtype, device=plan.device)
        }
        for side, length, rotated in (("left", plan.m, plan.rotate_left), ("right", plan.n, plan.rotate_right)):
            if rotated:
                eye = torch.eye(length, dtype=plan.dtype, device=plan.device).expand(plan.size, -1, -1)
                self.stacks[f"factor_{side}"] = torch.zeros_like(eye, memory_format=torch.contiguous_format)
                self.stacks[f"basis_{side}"] = eye.clone(memory_format=torch.contiguous_format)

    def views(self, slot: Slot, layout: MatrixLayout) -> dict[str, Tensor]:
        """The state of one parameter's matrices, by name, as views into the stacks.

        Names of a parameter's second part on carry the part's number. The momentum of an undivided parameter has
        the parameter's shape; a single matrix drops the leading dimension of its factors.
        """
        suffix = f".{slot.part}" if slot.part else ""
        views = {name: stack[slot.start : slot.start + slot.count] for name, stack in self.stacks.items()}
        if len(layout.parts) == 1 and layout.parts[0].columns.count == 1:
            views["momentum"] = views["momentum"].view(layout.shape)
        if slot.count == 1:
            views = {name: view if name == "momentum" else view[0] for name, view in views.items()}
        return {name + suffix: view for name, view in views.items()}

    def direction(self, G: Tensor, active: Tensor | None, beta1: float, eps: float) -> Tensor:
        """Take the gradient (b, m, n) of the active matrices into their momentum; return the direction U (b, m, n).

        Args:
            active: positions (b,) of the matrices that have a gradient; None for all of them.
        """
        M = self._take("momentum", active)
        assert M is not None
        M.lerp_(G, 1 - beta1)
        self._put("momentum", active, M)
        return whitened_direction(M, self._take("basis_left", active), self._take("basis_right", active), eps)

    def accumulate(self, G: Tensor, active: Tensor | None, beta2: float) -> None:
        """Take the gradient (b, m, n) of the active matrices into their factors."""
        L, R = self._take("factor_left", active), self._take("factor_right", active)
        accumulate_factors(G, L, R, beta2)
        self._put("factor_left", active, L)
        self._put("factor_right", active, R)

    def refresh(self, due: list[int], method: Method) -> set[int]:
        """Renew the bases of the matrices at the positions ``due``; return the positions that kept an old one."""
        chosen = None if len(due) == self.plan.size else torch.tensor(due, device=self.plan.device)
        failures: set[int] = set()
        for side in ("left", "right"):
            S, Q = self._take(f"factor_{side}", chosen), self._take(f"basis_{side}", chosen)
            if S is not None and Q is not None:
                basis, failed = refreshed_basis(S, Q, method)
                self.stacks[f"basis_{side}"].index_copy_(0, self._positions(chosen), basis)
                failures.update(due[i] for i, bad in enumerate(failed) if bad)
        return failures

    def _positions(self, chosen: Tensor | None) -> Tensor:
        return torch.arange(self.plan.size, device=self.plan.device) if chosen is None else chosen

    def _take(self, name: str, active: Tensor | None) -> Tensor | None:
        stack = self.stacks.get(name)
        return stack if stack is None or active is None else stack[active]

    def _put(self, name: str, active: Tensor | None, value: Tensor | None) -> None:
        if active is not None and value is not None:
            self.stacks[name][active] = value
