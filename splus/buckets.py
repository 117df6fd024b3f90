"""The state of matrices of one shape, stacked, and what happens to them in a step.

The optimizer's state dict holds views into these stacks, one for each parameter.
"""

import torch
from torch import Tensor

from splus.eigenbasis import Method, refreshed_basis
from splus.matrices import MatrixLayout
from splus.owned import owned_tensor
from splus.plan import BucketPlan, Slot
from splus.update import (
    Scratch,
    accumulate_factors,
    frobenius_factor,
    spectral_factor,
    start_vector,
    whitened_direction,
)
from splus.workspace import Workspace

# Entries of factors that are decomposed together. Solvers take one matrix at a time beyond small sizes, and hold
# several copies of what they are given.
DECOMPOSITION_LIMIT = 2**18


class Bucket:
    """B matrices of m×n: momentum (B, m, n), factors and bases (B, m, m) and (B, n, n) of the rotated sides.

    Args:
        matmul_dtype: of the bases and the products with them; None for that of the rest of the state.
        spectral: whether directions are normalized by their spectral norms, from singular vectors (B, n).
        remembers: whether the rotated momentum is normalized by what it was lately, from ``recent_norm`` (B, m, n).
    """

    def __init__(
        self,
        plan: BucketPlan,
        matmul_dtype: torch.dtype | None = None,
        spectral: bool = False,
        remembers: bool = False,
    ) -> None:
        self.plan = plan
        self.rotation_dtype = matmul_dtype or plan.dtype
        self.stacks: dict[str, Tensor] = {
            "momentum": torch.zeros(plan.size, plan.m, plan.n, dtype=plan.dtype, device=plan.device)
        }
        for side, length, rotated in (("left", plan.m, plan.rotate_left), ("right", plan.n, plan.rotate_right)):
            if rotated:
                shape = (plan.size, length, length)
                self.stacks[f"factor_{side}"] = torch.zeros(shape, dtype=plan.dtype, device=plan.device)
                eye = torch.eye(length, dtype=self.rotation_dtype, device=plan.device)
                self.stacks[f"basis_{side}"] = eye.expand(shape).clone(memory_format=torch.contiguous_format)

        if remembers:
            dtype = self.rotation_dtype if plan.rotate_left or plan.rotate_right else plan.dtype
            self.stacks["recent_norm"] = torch.zeros_like(self.stacks["momentum"], dtype=dtype)
        if spectral and plan.scale is not None:
            v = start_vector(plan.n).to(plan.device, plan.dtype)
            self.stacks["singular_vector"] = v.expand(plan.size, -1).clone(memory_format=torch.contiguous_format)

    def views(self, slot: Slot, layout: MatrixLayout) -> dict[str, Tensor]:
        """The state of one parameter's matrices, by name, as views into the stacks.

        Names of a parameter's second part on carry the part's number. The momentum of an undivided parameter has
        the parameter's shape; a single matrix drops the leading dimension of its factors.
        """
        part = layout.parts[slot.part]
        count = layout.count(part)
        views = {}
        for name, stack in self.stacks.items():
            of_slot = stack[slot.start : slot.start + slot.count]
            shape = stack.shape[1:] if count == 1 else (count, *stack.shape[1:])
            if name == "momentum" and len(layout.parts) == 1 and part.columns.count == 1:
                shape = layout.shape
            views[name] = of_slot.view(shape) if self.plan.team is None else owned_tensor(of_slot, shape, slot.indices)
        suffix = f".{slot.part}" if slot.part else ""
        return {name + suffix: view for name, view in views.items()}

    def take_in(self, G: Tensor, run: slice, beta1: float) -> None:
        """Take the gradients (b, m, n) of a run of the matrices into their momenta."""
        self.stacks["momentum"][run].lerp_(G, 1 - beta1)

    def accumulate(self, G: Tensor, run: slice, beta2: float) -> None:
        """Take the gradients (b, m, n) of a run of the matrices into their factors."""
        accumulate_factors(G, self._run("factor_left", run), self._run("factor_right", run), beta2)

    def scratch(self, run: slice, workspace: Workspace) -> Tensor:
        """Where the gradients (b, m, n) of a run of the matrices are put together."""
        return workspace.pair((run.stop - run.start, self.plan.m, self.plan.n), self.plan.dtype, self.plan.device)[0]

    def reserve(self, run: slice, workspace: Workspace) -> None:
        """Have the workspace hold what a step of a run of the matrices takes from it."""
        self.scratch(run, workspace)
        self._product_scratch(run, workspace)

    def direction(self, run: slice, eps: float, decay: float, workspace: Workspace) -> Tensor:
        """The directions U (b, m, n) of a run of the matrices, in the workspace, of the norm that they are to have.

        Args:
            eps, decay: as ``eps`` and ``normalization_decay`` of :class:`~splus.SPlus`.
        """
        recent, v = self._run("recent_norm", run), self._run("singular_vector", run)
        U, after = self._directed(run, eps, decay, self._product_scratch(run, workspace), recent)
        if v is not None and after is not None:
            v.copy_(after)
        return U

    def preview(self, eps: float, decay: float) -> Tensor:
        """The directions (B, m, n) of all matrices if their momenta stayed as they are; nothing is changed."""
        every, recent = slice(0, self.plan.size), self.stacks.get("recent_norm")
        return self._directed(every, eps, decay, None, None if recent is None else recent.clone())[0]

    def _directed(
        self, run: slice, eps: float, decay: float, scratch: Scratch | None, recent: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Directions and their singular vectors. ``recent`` is updated in place."""
        bases = self._run("basis_left", run), self._run("basis_right", run)
        U = whitened_direction(self.stacks["momentum"][run], *bases, eps, scratch, recent, decay)
        v = self._run("singular_vector", run)
        if v is not None:
            factor, after = spectral_factor(U, v)
            return U.mul_(factor), after
        return (U if recent is None else U.mul_(frobenius_factor(U))), None

    def refresh(self, due: list[int], method: Method) -> set[int]:
        """Renew the bases of the matrices at the positions ``due``; return the positions that kept an old one.

        What the momentum was in the old basis is forgotten.
        """
        failures: set[int] = set()
        for side, length in (("left", self.plan.m), ("right", self.plan.n)):
            if f"basis_{side}" in self.stacks:
                together = max(1, DECOMPOSITION_LIMIT // length**2)
                for first in range(0, len(due), together):
                    failures |= self._refresh_side(side, due[first : first + together], method)
        if "recent_norm" in self.stacks:
            self.stacks["recent_norm"][torch.tensor(due, dtype=torch.long, device=self.plan.device)] = 0
        return failures

    def _refresh_side(self, side: str, due: list[int], method: Method) -> set[int]:
        factors, bases = self.stacks[f"factor_{side}"], self.stacks[f"basis_{side}"]
        alone = len(due) == 1
        chosen = slice(due[0], due[0] + 1) if alone else torch.tensor(due, device=self.plan.device)
        basis, failed = refreshed_basis(factors[chosen], bases[chosen].to(factors.dtype), method)
        bases[chosen] = basis.to(bases.dtype)
        return {due[i] for i, bad in enumerate(failed) if bad}

    def _product_scratch(self, run: slice, workspace: Workspace) -> tuple[Tensor, Tensor]:
        rotates = self.plan.rotate_left or self.plan.rotate_right
        shape = self.stacks["momentum"][run].shape
        return workspace.pair(shape, self.rotation_dtype if rotates else self.plan.dtype, self.plan.device)

    def _run(self, name: str, run: slice) -> Tensor | None:
        return self.stacks[name][run] if name in self.stacks else None
