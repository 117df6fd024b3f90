"""SPlus: Shampoo in a cached eigenbasis with instantaneous normalization (arXiv 2506.07254), as a torch optimizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from splus.agreement import check_plans
from splus.arguments import check_group, check_not_flattened, make_plain, refuse_unsupported
from splus.averaging import keep_weights, put_back_weights, put_in_averages
from splus.books import GroupBooks
from splus.gradients import usable_gradients
from splus.loading import load_optimizer_state
from splus.matrices import Oversized, Sections, Sides
from splus.metrics import group_metrics
from splus.owned import full
from splus.phases import Prepared, refresh_bases, step_group
from splus.precision import exact_arithmetic
from splus.scaling import StepNorm, StepScale
from splus.shared import step_shared
from splus.teams import ProcessGroup, Teams, gather_anew
from splus.workspace import Workspace


class SPlus(Optimizer):
    r"""SPlus, a drop-in replacement for :class:`torch.optim.Adam` that whitens the updates of matrices.

    For a weight matrix W (m×n) with gradient G, momentum M, factors L (m×m), R (n×n) and their eigenbases Q_L, Q_R::

        M ← β1 M + (1-β1) G
        X ← Q_Lᵀ M Q_R,   V ← γ V + X²
        U ← Q_L (X / √V) Q_Rᵀ,   U ← U · √(mn) / (4 ‖U‖_2)
        W ← W - lr · s · U,   s = 2/(m+n)
        A ← ρ A + (1-ρ) W,    evaluated at A / (1-ρᵗ)
        W ← W · (1 - lr · s · weight_decay)
        L ← β2 L + (1-β2) G Gᵀ,   R ← β2 R + (1-β2) Gᵀ G
        every now and then:  Q_L, Q_R ← eigenbases of L, R, first used in the next step; V ← 0

    Parameters that are not whitened (vectors, scalars; with :func:`~splus.param_groups` also embeddings and the output
    head) take ``U = M / √V̂``, V̂ a mean of M² by γ, ``s = elementwise_scale / n ** width_power``. Gradients are taken
    at W and the model is evaluated at the average: validate, sample and export inside :meth:`averaged`, or between
    :meth:`eval` and :meth:`train`.

    An entry whose gradients end, as of an embedding's row that is not in a batch, moves on until its momentum has faded
    from the dtype's normal range: 820 steps from a gradient of 1 at β1 = 0.9.

    Every hyperparameter can be set per group. State is fp32 (fp64 for fp64 parameters) whatever the parameter's dtype;
    bf16 and fp16 parameters keep an fp32 copy of their weights in the state, so that small steps are not rounded away.

    Gradients of any size are followed: beyond 1e±12 the state holds momentum and factors of gradients times a power of
    two, which depends on its entry ``peak``. One that is not finite skips its parameter in that step as if it had none:
    said once, an error after 10 in a row. A basis whose decomposition fails, in fp64 too, is kept: said once, an error
    after 3 in a row.

    Ranks share the work on DTensors (of FSDP2, HSDP, tensor parallelism), and with ``process_group`` that on parameters
    which all of them hold: every matrix has one owner, which gathers its gradient, keeps its momentum, factors and
    bases, and sends out its update. The answer is that of one process up to rounding, and the same on every rank. A
    gradient that is not finite anywhere, or that some ranks lack, skips its parameter everywhere. All ranks call
    :meth:`step` alike; nothing else communicates but :meth:`full_state_dict`.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer; see :func:`~splus.param_groups`.
        lr: learning rate, a float or a tensor of one element. :func:`~splus.lr_from_adam` converts one from Adam.
        betas: decays of the momentum and of the factors.
        eps: a rotated entry below ``eps`` times its matrix's Frobenius norm counts as zero, any other as smaller by it.
        normalization_decay: γ, the decay of V: 0.5 remembers about two steps. 0 takes the sign, which is the published
            instantaneous normalization, and keeps no ``recent_norm`` in the state.
        weight_decay: decoupled decay, on the scale of the step: W shrinks by lr · s · weight_decay.
        scale_weight_decay: False leaves s out of that: W shrinks by lr · weight_decay, whatever its shape.
        ema_decay: decay ρ of the averaged weights. It sets a horizon of 1/(1-ρ) steps; 1 - 10/steps suits a run.
        precondition_frequency: steps between refreshes of a matrix's bases, once the early ones are over.
        max_preconditioner_dim: the longest side that is rotated whole.
        step_norm: the norm of a whitened direction that is always the same: "spectral", √(mn)/4, as one power iteration
            a step estimates it; "frobenius", √(mn), which is what signs have (the published rule).
        step_scale: of a whitened m×n matrix, in units of lr: "shape", 2/(m+n); "fan_in", 1/n; "none", 1.
        elementwise_scale: of the parameters that are not whitened.
        width_power: of the length n of a row (the last dimension), by which the step of those of them with two or
            more dimensions is divided, such as embeddings.
        whiten: True, every parameter with two sides of 2 or more; "auto", those whose sides are all within
            ``max_preconditioner_dim``; "2d", every 2-D parameter and no others; False, none.
        split: sections of a fused matrix that are whitened apart: their number or a tuple of sizes along ``split_dim``
            (0 rows, 1 columns). A list gives each parameter of the group its own; so for the next two.
        stacked: the leading dimensions count matrices, as in (experts, m, n); otherwise (out, in, *k) is out × in·k.
        oversized: a side beyond ``max_preconditioner_dim`` is cut into "blocks" or left "unrotated"; "published" is
            what the authors' file does.
        sides: "both" of a matrix are rotated, or the "shorter" one alone (the rows of a square); "auto", both unless
            one is more than 100 times the other, as in LoRA factors.
        matmul_dtype: of the bases, of V and of the products that rotate by them: torch.bfloat16, float32 or float64;
            None for fp32 (fp64 for fp64 parameters). Factors and decompositions stay fp32.
        refresh_method: "qr", a warm-started orthogonal iteration (the first basis is decomposed in full); "eigh", full
            decompositions only.
        refresh_growth: an early interval between refreshes is this less 1 times the steps so far, up to
            ``precondition_frequency``; None for no early ones.
        spread_refreshes: matrices take turns in refreshing, so that no step pays for all of them: the first time within
            10 steps, and no matrix twice within 5. False refreshes all at once, from step 1 on.
        maximize: ascend instead of descend.
        foreach: accepted for Adam's sake; steps are batched whatever it says.
        process_group: ranks that hold the same parameters and gradients, as with DistributedDataParallel, and share the
            work. DTensors are shared by their whole mesh without it; with it, by the ranks of their mesh that are in
            it, which must hold all shards of one copy.
        amsgrad, capturable, differentiable, fused, decoupled_weight_decay: arguments of Adam that raise a ValueError
            when set to anything but their value here.

    Raises:
        ValueError: a hyperparameter out of range, a parameter that is complex or an integer.
    """

    # Where a default is not the published one, it measured better or as well: loss of the averaged weights at the end
    # of `python -m train preset=quick steps=300 optimizer.lr=0.2 optimizer.betas=…` (and so on), on language modelling,
    # image classification, diffusion; one seed, and two seeds differ by about .01.
    #   β2                     .95 1.457 .493 .394   .97 1.461 .491 .389   .99 1.488 .488 .390   .999 1.498 .524 .393
    #   elementwise_scale      .01 1.459 .549        .02 1.461 .491 .389   .03 1.477 .479 .386
    #   precondition_frequency 5 1.443 .492          10 1.461 .491 .389
    #   eps, at β2 = .999      0 1.490 .519 .395     1e-6 1.498 .524 .393: no difference in loss. 3e-7 is above what
    #                          rounding leaves in a null direction (1.5e-7) and below the weakest hundredth of signal
    #                          (3e-6) up to 768×3072: `python -m benchmarks.rounding`
    # From here on with diffusion at a rate of 0.4:
    #   refresh_growth         1.15 1.459 .481 .370  1.3 1.472 .493 .372  None 1.498 .496 .371
    #   matmul_dtype           fp32 1.459 .481 .370  bf16 1.465 .486 .373: a little worse, within the noise, in all runs
    #   sides                  both 1.459 .481 .370  shorter 1.813 .580 .384
    # step_norm and width_power, at 200 steps and a rate of 0.2, from `python -m benchmarks.ablation`:
    #   the default 1.540 .518 .417    frobenius 1.574 .532 .419    constant embeddings and head 1.572 .531 .436
    # normalization_decay, on another processor:
    #   0 1.541 .495 .416    0.5 1.496 .495 .404    0.9 1.493 .485 .402
    # and on text at 300 steps, means of seeds 0 to 2: 0.5 1.371, 0.9 1.374.
    # All before that was measured with signs, what comes before step_norm with Frobenius norms and constant rows, and
    # what comes before refresh_growth with refreshes of all matrices at steps 1, 2, 3, 4, 5, 7, … (1.451 .485 .373).
    # `python -m benchmarks.ablation` prints more. max_preconditioner_dim is within the 1024 to 8192 that Distributed
    # Shampoo's README calls the sweet spot of block sizes.
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        betas: tuple[float, float] = (0.9, 0.97),
        eps: float = 3e-7,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        normalization_decay: float = 0.5,
        scale_weight_decay: bool = True,
        ema_decay: float = 0.999,
        precondition_frequency: int = 10,
        max_preconditioner_dim: int = 4096,
        step_norm: StepNorm = "spectral",
        step_scale: StepScale = "shape",
        elementwise_scale: float = 0.02,
        width_power: float = 0.0,
        whiten: bool | str = "auto",
        split: Sections | list[Sections] = None,
        split_dim: int | list[int] = 0,
        stacked: bool | list[bool] = False,
        oversized: Oversized = "blocks",
        sides: Sides = "auto",
        matmul_dtype: torch.dtype | None = None,
        refresh_method: str = "qr",
        refresh_growth: float | None = 1.15,
        spread_refreshes: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        refuse_unsupported(
            amsgrad=amsgrad,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "normalization_decay": normalization_decay,
            "weight_decay": weight_decay,
            "scale_weight_decay": scale_weight_decay,
            "ema_decay": ema_decay,
            "precondition_frequency": precondition_frequency,
            "max_preconditioner_dim": max_preconditioner_dim,
            "step_norm": step_norm,
            "step_scale": step_scale,
            "elementwise_scale": elementwise_scale,
            "width_power": width_power,
            "whiten": whiten,
            "split": split,
            "split_dim": split_dim,
            "stacked": stacked,
            "oversized": oversized,
            "sides": sides,
            "matmul_dtype": matmul_dtype,
            "refresh_method": refresh_method,
            "refresh_growth": refresh_growth,
            "spread_refreshes": spread_refreshes,
            "maximize": maximize,
            "training": True,
        }
        self._books: list[GroupBooks] = []
        self._workspace = Workspace()
        self._teams = Teams(process_group)
        self._plans_checked = True
        super().__init__(params, defaults)

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its state; it joins in the mode that the optimizer is in."""
        self._follow_groups()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            make_plain(group)
            check_group(group)
            group["betas"] = tuple(float(beta) for beta in group["betas"])
            books = GroupBooks(group, len(self._books), self._teams, owned={})
        except ValueError:
            self.param_groups.pop()
            raise
        group["training"] = not self._books or self.training
        self._books.append(books)
        self._plans_checked = False
        self.state.update(books.linked_state(self.state))
        if not self.training:
            keep_weights(books.parameters.values(), self.state)

    @property
    def training(self) -> bool:
        """Whether the model holds the weights being trained (True) or the averaged ones (False)."""
        return bool(self.param_groups[0]["training"])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # Never compiled, also inside torch.compile(optimizer.step): fusing the elementwise tail saved 2 to 5% of a step on
    # two cores, after a minute of compilation; and lr, step counts and refreshes are decided on the host.
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others and their state stay as they are.

        Args:
            closure: evaluates the model anew and returns the loss; it runs with gradients enabled.

        Raises:
            RuntimeError: in eval mode; for a sparse gradient; after repeated faults, naming the parameter.
            torch.OutOfMemoryError: scratch memory and copies are made before the update, which leaves everything as it
                was; within the update it can only come from the batch at hand, whose parameters may be half updated;
                in a refresh of bases the update is whole, and the bases are the old ones.
        """
        if not self.training:
            raise RuntimeError(
                "step() is called while the model holds the averaged weights. "
                "Call optimizer.train() before training goes on, or evaluate inside `with optimizer.averaged():`."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        if not self._plans_checked:
            check_plans(self._books)
            self._plans_checked = True
        options = [{name: group[name] for name in self.defaults if name in group} for group in self.param_groups]
        gradients, sizes = usable_gradients(self._books, options)
        with exact_arithmetic({gradient.device.type for of_group in gradients for gradient in of_group.values()}):
            prepared = [
                Prepared(books, self.state, found, of_group, self._workspace)
                for books, found, of_group in zip(self._books, gradients, sizes)
            ]
            for group, ready in zip(self.param_groups, prepared):
                with ready.written_back():
                    step_group(group, ready, self._workspace)
                    step_shared(group, ready, self.state, self._workspace)
            for group, books, found in zip(self.param_groups, self._books, gradients):
                refresh_bases(group, books, self.state, found)
        return loss

    def eval(self) -> "SPlus":
        """Put the averaged weights into the model: for validation, sampling and export. Idempotent."""
        return self.train(False)

    @torch.no_grad()
    def train(self, mode: bool = True) -> "SPlus":
        """Put the weights being trained back into the model, bit for bit (or, with False, as :meth:`eval`). Idempotent.

        Call it outside autocast blocks or inside, its cache of low-precision weights is dropped. Modules of
        ``fully_shard`` drop the weights that they have gathered, so that the next forward pass sees the new ones.
        """
        if mode == self.training:
            return self
        self._follow_groups()
        for group, books in zip(self.param_groups, self._books):
            if mode:
                put_back_weights(books.parameters.values(), self.state)
            else:
                put_in_averages(books.parameters.values(), self.state)
            group["training"] = mode
            gather_anew(books.parameters.values())
        torch.clear_autocast_cache()
        return self

    @contextmanager
    def averaged(self) -> Iterator["SPlus"]:
        """The averaged weights are in the model inside, what was there before outside, whatever is raised. Nests."""
        before = self.training
        self.eval()
        try:
            yield self
        finally:
            self.train(before)

    def metrics(self) -> list[dict[str, Any]]:
        """For each group, what its next update looks like; computed when asked for, from the state as it is.

        Of matrices that ranks share, those that this rank owns; of other parameters, what it holds.

        Returns:
            Dictionaries with ``name`` (if the group has one), ``update_rms`` (root mean square of lr · s · U over
            the group's entries), ``basis_drift`` (the largest ‖offdiag(QᵀSQ)‖ / ‖QᵀSQ‖ of a factor),
            ``orthogonality_error`` (max |QᵀQ - I|), ``refreshes`` (of matrices, so far) and ``refresh_seconds``.
        """
        self._follow_groups()
        return [group_metrics(group, books, self.state) for group, books in zip(self.param_groups, self._books)]

    def state_dict(self) -> dict[str, Any]:
        """As of every torch optimizer; with the average in either mode, and in eval mode the weights being trained."""
        self._follow_groups()
        for group in self.param_groups:
            make_plain(group)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, of an optimizer with the same groups and parameters.

        Parameters match by name if both sides have names, else by position. Values are copied into the state at
        hand: it keeps its dtype and device and shares nothing with ``state_dict``. Hyperparameters and mode come from
        the file, as for every torch optimizer; the model's weights are not touched, so load those of the same time.

        To start afresh where a shape has changed, such as that of a new head, put the state at hand in its place (in
        the mode of the file)::

            fresh = optimizer.state_dict()["state"]
            for i, state in fresh.items():
                if state["average"].shape != saved["state"][i]["average"].shape:
                    saved["state"][i] = state
            optimizer.load_state_dict(saved)

        Raises:
            ValueError: groups, names, shapes or structural options differ; nothing has been changed then.
        """
        self._follow_groups()
        load_optimizer_state(self, state_dict)

    def full_state_dict(self) -> dict[str, Any]:
        """As :meth:`state_dict`, with every tensor whole and on the CPU, also what ranks share; all of them call this.

        :meth:`load_state_dict` takes it on any number of ranks, called on each of them. It needs the memory for the
        whole state on every rank; :mod:`torch.distributed.checkpoint` does not.
        """
        state_dict = self.state_dict()
        teams = {parameter: team for books in self._books for parameter, team in books.sharing.by_parameter().items()}
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            group = teams[order[index]].group if order[index] in teams else None
            state_dict["state"][index] = {
                key: full(value, group) if isinstance(value, Tensor) else value for key, value in state.items()
            }
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        if any(books.sharing.teams for books in self._books):
            raise RuntimeError(
                "An SPlus that shares its work among ranks cannot be copied or pickled. Make a new one, and load what "
                "state_dict() or full_state_dict() of this one returns."
            )
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._books = []
        self._workspace = Workspace()
        self._teams = Teams(None)
        self._plans_checked = True
        self._follow_groups()

    @torch.no_grad()
    def _follow_groups(self) -> None:
        """Make the books anew, with the state there is, if someone has changed ``param_groups`` or ``state`` by hand.

        A parameter that is in no group any more leaves with its own weights and without its state.

        Raises:
            ValueError: options of a group were changed that the shapes of its state depend on.
        """
        groups = self.param_groups
        if len(groups) == len(self._books) and all(
            books.are_of(group, self.state) for books, group in zip(self._books, groups)
        ):
            return
        for books, group in zip(self._books, groups):
            check_not_flattened(group, [books.names[position] for position in books.layouts], self.state)
        owned = {parameter: owners for books in self._books for parameter, owners in books.sharing.owners().items()}
        self._teams.start_anew()
        renewed = [GroupBooks(group, index, self._teams, owned) for index, group in enumerate(groups)]
        self._plans_checked = False
        linked = [books.linked_state(self.state) for books in renewed]
        listed = {parameter for group in groups for parameter in group["params"]}
        for parameter in [parameter for parameter in self.state if parameter not in listed]:
            if not self.training:
                put_back_weights([parameter], self.state)
            del self.state[parameter]
        self._books = renewed
        for state in linked:
            self.state.update(state)
            if not self.training:
                keep_weights([parameter for parameter in state if "weights" not in state[parameter]], self.state)
