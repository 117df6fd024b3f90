"""The rule of SPlus, slow and plain: one parameter at a time, fp64, no batches. Every fast path is held to it.

For a matrix (m, n): G gradient, M momentum, L (m, m) and R (n, n) factors, Q_L and Q_R their eigenbases with
eigenvectors in columns, W weights, A averages without bias correction.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Reference:
    """One matrix stepped by the rule, or with ``whitened=False`` one parameter of any shape by the elementwise rule.

    ``scale`` replaces 2/(m+n), ``step_norm="frobenius"`` leaves out the spectral normalization. ``left`` and ``right``
    say which sides are rotated. ``margin`` is the smallest relative change so far that could have changed a sign or
    turned the power iteration: other arithmetic agrees as long as it is well above rounding.
    """

    def __init__(
        self,
        weights: Tensor,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.97),
        eps: float = 3e-7,
        normalization_decay: float = 0.5,
        weight_decay: float = 1e-2,
        ema_decay: float = 0.999,
        precondition_frequency: int = 10,
        refresh_growth: float | None = 1.15,
        refresh_method: str = "qr",
        turn: int = 0,
        spread: bool = True,
        scale: float | None = None,
        step_norm: str = "spectral",
        whitened: bool = True,
        left: bool = True,
        right: bool = True,
    ) -> None:
        self.lr, (self.beta1, self.beta2), self.eps = lr, betas, eps
        self.decay, self.rho, self.gamma = weight_decay, ema_decay, normalization_decay
        self.schedule = (precondition_frequency, refresh_growth, *((turn, 10, 5) if spread else (-1, 1, 1)))
        self.method, self.whitened, self.left, self.right = refresh_method, whitened, left, right
        self.t, self.has_basis, self.margin = 0, False, math.inf
        self.W = weights.detach().to(torch.float64, copy=True)
        self.M, self.A, self.V = (torch.zeros_like(self.W) for _ in range(3))
        if whitened:
            m, n = self.W.shape
            self.L, self.R = torch.zeros(m, m, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
            self.Q_L, self.Q_R = torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
            scale = 2 / (m + n) if scale is None else scale
            self.v = torch.arange(1, n + 1, dtype=torch.float64).square().cos()
            self.spectral = step_norm == "spectral"
        self.s = 0.02 if scale is None else scale

    def step(self, gradient: Tensor) -> None:
        G = gradient.to(torch.float64)
        self.t += 1
        self.M = self.beta1 * self.M + (1 - self.beta1) * G
        if self.whitened:
            U = self.direction()
        else:
            self.note(self.M[self.M != 0], self.M)
            U = self.normalized(self.M) * math.sqrt((1 - self.gamma**self.t) / (1 - self.gamma))
        if self.whitened and self.spectral and bool((U != 0).any()):
            u = U @ self.v
            self.note(u.norm(), U)
            self.v = U.T @ (u / u.norm())
            sigma = self.v.norm()
            self.v = self.v / sigma
            U = U * math.sqrt(U.numel()) / 4 / sigma
        elif self.whitened and self.gamma and bool((U != 0).any()):
            U = U * math.sqrt(U.numel()) / U.norm()
        self.W = self.W - self.lr * self.s * U
        self.A = self.rho * self.A + (1 - self.rho) * self.W
        self.W = self.W * (1 - self.lr * self.s * self.decay)
        if self.whitened:
            self.L = self.beta2 * self.L + (1 - self.beta2) * G @ G.T
            self.R = self.beta2 * self.R + (1 - self.beta2) * G.T @ G
            if self.t in refresh_steps(self.t, *self.schedule):
                method = self.method if self.has_basis else "eigh"
                self.Q_L = new_basis(self.L, self.Q_L, method) if self.left else self.Q_L
                self.Q_R = new_basis(self.R, self.Q_R, method) if self.right else self.Q_R
                self.has_basis, self.V = True, torch.zeros_like(self.W)

    def direction(self) -> Tensor:
        """U: the rotated momentum over what it was lately, rotated back; entries that are noise count as zero."""
        X = self.Q_L.T @ self.M @ self.Q_R
        noise = self.eps * math.sqrt(float((X**2).sum()))
        self.note(X.abs() - noise, X)
        heard = [[math.copysign(max(abs(x) - noise, 0.0), x) for x in row] for row in X.tolist()]
        return self.Q_L @ self.normalized(torch.tensor(heard, dtype=torch.float64)) @ self.Q_R.T

    def normalized(self, X: Tensor) -> Tensor:
        """X / √V, with V the sum of X² lately; the sign if that is X² alone."""
        self.V = self.gamma * self.V + X**2
        return torch.where(X == 0, 0.0, X / self.V.sqrt())

    def note(self, distances: Tensor, whole: Tensor) -> None:
        """Lower the margin to the least of these distances, in units of the norm of what they are part of."""
        norm = float(whole.norm())
        self.margin = min([self.margin, *(abs(d) / norm for d in distances.flatten().tolist() if norm > 0)])

    @property
    def average(self) -> Tensor:
        """The bias-corrected average, at which the model is evaluated; before any step the weights."""
        return self.A / (1 - self.rho**self.t) if self.t else self.W


def refresh_steps(last: int, period: int, growth: float | None, turn: int, first: int, shortest: int) -> set[int]:
    """The steps from 1 to ``last`` that end with a refresh: one in every round, at the matrix's turn (-1 the last).

    The first round takes ``first`` steps. A later one takes (growth - 1) times the steps so far, rounded down, but
    at least ``shortest`` and at most ``period``; without growth it lasts to the next multiple of ``period``.
    """
    steps, begin, length = set(), 0, min(first, period)
    while begin < last:
        steps.add(begin + 1 + turn % period * length // period)
        begin += length
        if growth is None:
            length = period - begin % period
        else:
            length = min(period, max(shortest, math.floor((growth - 1) * begin)))
    return {step for step in steps if step <= last}


def new_basis(S: Tensor, Q: Tensor, method: str) -> Tensor:
    """The eigenvectors of S (n, n): all anew, or by one orthogonal iteration from Q with the strongest first."""
    if method == "eigh":
        return torch.linalg.eigh(S).eigenvectors
    columns = sorted(Q.T, key=lambda q: float(q @ S @ q), reverse=True)
    basis: list[Tensor] = []
    for image in [S @ q for q in columns]:
        for q in basis * 2:  # Gram–Schmidt; once over leaves rounding, twice is orthogonal
            image = image - (q @ image) * q
        basis.append(image / image.norm())
    return torch.stack(basis, dim=1)


def orthogonal(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(draws(1, n, n, seed=seed)[0]).Q


def factor(n: int, seed: int = 0) -> Tensor:
    """A positive definite matrix with eigenvalues that are apart."""
    Q = orthogonal(n, seed)
    return (Q * torch.logspace(0, -2, n, dtype=torch.float64)) @ Q.T


def draws(steps: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random gradients (steps, *shape); any of them has full rank."""
    return torch.randn(steps, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drive(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Iterable[Sequence[Tensor | None]]
) -> None:
    """Step once for each list of gradients, one for each parameter (None for none)."""
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step):
            parameter.grad = gradient if gradient is None else gradient.clone()
        optimizer.step()
