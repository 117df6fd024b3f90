"""The rule: the optimizer against the slow reference, and what must hold of any step."""

from typing import Any

import pytest
import torch
from reference import Reference, draws, drive, factor, orthogonal
from torch import Tensor, nn

from splus import PAPER, SPlus
from splus.update import (
    accumulate_factors,
    noise_level,
    rotate,
    rotate_back,
    shrink,
    sign_from,
    soft_sign,
    spectral_factor,
    start_vector,
    whitened_direction,
)

DOUBLE = torch.float64


def start_from_full_rank(optimizer: SPlus, parameter: Tensor, reference: Reference | None = None) -> None:
    """Factors of full rank before step 1, so that a rectangular matrix has one right basis from the start."""
    for side, n in zip(("left", "right"), parameter.shape):
        optimizer.state[parameter][f"factor_{side}"].copy_(factor(n, seed=n))
    if reference is not None:
        reference.L, reference.R = (factor(n, seed=n) for n in parameter.shape)


def moves(shape: tuple[int, int], gradients: Tensor, full_rank: bool = True, **settings: Any) -> Tensor:
    """The weights (steps, m, n) of a matrix that starts at zero and does not decay."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=gradients.dtype))
    optimizer = SPlus([parameter], **{"weight_decay": 0.0, **settings})
    if full_rank:
        start_from_full_rank(optimizer, parameter)
    weights = []
    for G in gradients:
        drive(optimizer, [parameter], [[G]])
        weights.append(parameter.detach().clone())
    return torch.stack(weights)


@pytest.mark.parametrize("shape", [(6, 6), (7, 4), (3, 8)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"refresh_method": "eigh"},
        {"refresh_growth": None, "precondition_frequency": 7},
        {"eps": 0.0, "weight_decay": 0.0},
        {"eps": 0.1, "weight_decay": 3.0, "lr": 0.5},
        {"betas": (0.5, 0.9), "ema_decay": 0.8, "refresh_growth": 2.0, "precondition_frequency": 3},
        {"betas": (0.0, 0.9), "ema_decay": 0.0, "precondition_frequency": 1},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_matrix_follows_the_reference(shape: tuple[int, int], settings: dict[str, Any]) -> None:
    """Weights and averages of every step are the slow rule's, square and rectangular, at all kinds of settings."""
    parameter = nn.Parameter(draws(1, *shape, seed=5)[0])
    optimizer, reference = SPlus([parameter], **settings), Reference(parameter, **settings)
    start_from_full_rank(optimizer, parameter, reference)
    for G in draws(60, *shape):
        drive(optimizer, [parameter], [[G]])
        reference.step(G)
        torch.testing.assert_close(parameter.detach(), reference.W, rtol=0, atol=1e-10)
        torch.testing.assert_close(optimizer.state[parameter]["average"], reference.average, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4)])
def test_elementwise_follows_the_reference(shape: tuple[int, ...]) -> None:
    """A parameter that is not whitened follows the slow elementwise rule in any shape."""
    settings: dict[str, Any] = {"lr": 0.3, "weight_decay": 2.0, "ema_decay": 0.9, "betas": (0.8, 0.9)}
    parameter = nn.Parameter(draws(1, *shape, seed=5)[0])
    optimizer = SPlus([parameter], whiten=False, elementwise_scale=0.02, **settings)
    reference = Reference(parameter, whitened=False, scale=0.02, **settings)
    for G in draws(30, *shape):
        drive(optimizer, [parameter], [[G]])
        reference.step(G)
        torch.testing.assert_close(parameter.detach(), reference.W, rtol=0, atol=1e-13)
        torch.testing.assert_close(optimizer.state[parameter]["average"], reference.average, rtol=0, atol=1e-13)


def test_pure_functions_are_their_formulas() -> None:
    """Rotation, its inverse and the factors, matrix by matrix, and with a side that has no basis."""
    M = draws(3, 4, 5)
    Q_L, Q_R = torch.stack([orthogonal(4, i) for i in range(3)]), torch.stack([orthogonal(5, i) for i in range(3)])
    X = rotate(M, Q_L, Q_R)
    for b in range(3):
        torch.testing.assert_close(X[b], Q_L[b].T @ M[b] @ Q_R[b])
        torch.testing.assert_close(rotate(M, None, Q_R)[b], M[b] @ Q_R[b])
        torch.testing.assert_close(rotate(M, Q_L, None)[b], Q_L[b].T @ M[b])
    torch.testing.assert_close(rotate_back(X, Q_L, Q_R), M)
    torch.testing.assert_close(rotate_back(rotate(M, Q_L, None), Q_L, None), M)
    L, R = draws(3, 4, 4, seed=1), draws(3, 5, 5, seed=2)
    expected = [0.75 * L + 0.25 * M @ M.mT, 0.75 * R + 0.25 * M.mT @ M]
    accumulate_factors(M, L, R, 0.75)
    torch.testing.assert_close([L, R], expected)


def test_sign_threshold_is_each_matrix_own() -> None:
    """An entry counts as zero below eps times the Frobenius norm of its own matrix, whatever else is in the batch."""
    X = torch.tensor([[[3.0, -4], [0.49, -0.51]], [[3e9, 4e9], [-0.51e9, 0]], [[0, 0], [0, 0]]], dtype=DOUBLE)
    expected = torch.tensor([[[1.0, -1], [0, -1]], [[1, 1], [-1, 0]], [[0, 0], [0, 0]]], dtype=DOUBLE)
    signs = X.sign()
    assert torch.equal(sign_from(X.clone(), noise_level(X, 0.1)), expected)
    assert torch.equal(sign_from(X, noise_level(X, 0.0)), signs)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e36])
def test_soft_sign_has_no_scale_and_is_bounded(decay: float, size: float) -> None:
    """X over the root of the sum of recent X², at any size; no entry is beyond 1, and without memory it is the sign."""
    recent, V = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3, dtype=DOUBLE)
    for X in draws(6, 2, 4, 3, dtype=torch.float32):
        V = decay * V + X.double() ** 2
        U = soft_sign(X * size, recent, decay)
        torch.testing.assert_close(U.double(), X / V.sqrt(), rtol=2e-5, atol=0)
        torch.testing.assert_close(recent.double() / size, V.sqrt(), rtol=2e-5, atol=0)
        assert float(U.abs().max()) <= 1
        assert decay or torch.equal(U, X.sign())


def test_soft_sign_goes_through_zero_where_the_sign_jumps() -> None:
    """An entry that keeps its size has its sign; one that falls through zero has what it has fallen to."""
    X = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]])
    recent = torch.zeros_like(X)
    for _ in range(40):
        U = soft_sign(X.clone(), recent, 0.5)
    torch.testing.assert_close(U, X * 0.5**0.5)
    X[0, 0, 1] = 0.01
    U = soft_sign(X.clone(), recent, 0.5)
    torch.testing.assert_close(U, torch.tensor([[[0.5**0.5, 0.01], [0.5**0.5, 0.0]]]), rtol=1e-4, atol=0)


def test_shrink_takes_to_zero_what_is_below() -> None:
    X = torch.tensor([[[3.0, -3.0], [0.5, -0.5]], [[3.0, -3.0], [0.5, 0.0]]])
    shrink(X, torch.tensor([1.0, 0.25]).view(2, 1, 1), torch.empty_like(X))
    assert torch.equal(X, torch.tensor([[[2.0, -2.0], [0.0, 0.0]], [[2.75, -2.75], [0.25, 0.0]]]))


def test_a_new_basis_begins_without_memory() -> None:
    """In the step after a refresh the direction is that of signs, as if nothing had gone before."""
    gradients = draws(12, 6, 4)
    parameters = [nn.Parameter(torch.zeros(6, 4, dtype=DOUBLE)) for _ in "ab"]
    every_three: dict[str, Any] = {"precondition_frequency": 3, "refresh_growth": None, "spread_refreshes": False}
    every_three |= {"step_norm": "frobenius", "weight_decay": 0.0}  # power iterations remember too
    soft, hard = (
        SPlus([parameter], normalization_decay=decay, **every_three) for parameter, decay in zip(parameters, (0.5, 0.0))
    )
    agreed = []
    for step, G in enumerate(gradients, 1):
        before = [parameter.detach().clone() for parameter in parameters]
        drive(soft, parameters[:1], [[G]])
        drive(hard, parameters[1:], [[G]])
        steps = [parameter.detach() - start for parameter, start in zip(parameters, before)]
        if bool((soft.state[parameters[0]]["recent_norm"] == 0).all()):
            agreed.append(step + 1)
        elif step in agreed or step == 1:
            torch.testing.assert_close(steps[0], steps[1], rtol=1e-6, atol=1e-9)
    assert agreed == [2, 4, 7, 10, 13]


def test_without_memory_there_is_none_in_the_state() -> None:
    """The published normalization costs no memory; that of the default is one number an entry."""
    shapes = [(6, 4), (5,)]
    for decay in (0.0, 0.5):
        parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = SPlus(parameters, normalization_decay=decay)
        for parameter, shape in zip(parameters, shapes):
            assert ("recent_norm" in optimizer.state[parameter]) == (decay > 0)
            assert not decay or optimizer.state[parameter]["recent_norm"].shape == shape


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_frobenius_norm_is_the_same_whatever_is_remembered(decay: float) -> None:
    steps = moves((6, 4), draws(9, 6, 4), lr=0.3, step_norm="frobenius", normalization_decay=decay).diff(dim=0)
    torch.testing.assert_close(steps.norm(dim=(1, 2)), torch.full((8,), 0.3 * 2 / 10 * 24**0.5, dtype=DOUBLE))


def test_direction_ignores_signs_and_order_of_eigenvectors() -> None:
    """U is the same for any signs and order of the columns of the bases."""
    M, Q_L, Q_R = draws(2, 4, 6), orthogonal(4).expand(2, 4, 4), orthogonal(6).expand(2, 6, 6)
    flips = torch.tensor([1.0, -1, -1, 1], dtype=DOUBLE)
    other_L = (Q_L * flips)[..., [2, 0, 3, 1]]
    other_R = -Q_R.flip(-1)
    for eps in (0.0, 0.3):
        torch.testing.assert_close(
            whitened_direction(M, Q_L, Q_R, eps), whitened_direction(M, other_L, other_R, eps), rtol=0, atol=1e-14
        )


def test_inner_product_with_momentum_is_the_rotated_l1_norm() -> None:
    """<U, M> = Σ |Q_Lᵀ M Q_R|: the direction always descends along the momentum."""
    M, Q_L, Q_R = draws(3, 4, 6), orthogonal(4).expand(3, 4, 4), orthogonal(6).expand(3, 6, 6)
    U = whitened_direction(M, Q_L, Q_R, 0.0)
    torch.testing.assert_close((U * M).sum((1, 2)), rotate(M, Q_L, Q_R).abs().sum((1, 2)))


@pytest.mark.parametrize("shape", [(6, 6), (7, 4), (3, 8)])
def test_transposition_gives_transposed_updates(shape: tuple[int, int]) -> None:
    """The trajectory of Wᵀ under Gᵀ is the transpose of that of W under G."""
    gradients, settings = draws(40, *shape), {"step_norm": "frobenius"}  # an estimated norm is that of one side
    transposed = moves(shape[::-1], gradients.mT, **settings)
    torch.testing.assert_close(transposed, moves(shape, gradients, **settings).mT, rtol=0, atol=1e-11)


def test_orthogonal_change_of_basis_carries_over() -> None:
    """With A G Bᵀ in place of G, every move is A ΔW Bᵀ, from the first full-rank basis on (published settings)."""
    settings = {**PAPER, "precondition_frequency": 5, "weight_decay": 0.0}
    A, B, gradients = orthogonal(6, 1), orthogonal(6, 2), draws(40, 6, 6)
    plain = moves((6, 6), gradients, full_rank=False, **settings)
    turned = moves((6, 6), A @ gradients @ B.T, full_rank=False, **settings)
    expected = A @ (plain[1:] - plain[0]) @ B.T
    torch.testing.assert_close(turned[1:] - turned[0], expected, rtol=0, atol=1e-11)
    # The first step is taken in the identity basis and is not equivariant.
    assert (turned[0] - A @ plain[0] @ B.T).norm() > 0.1 * plain[0].norm()


@pytest.mark.parametrize("method", ["qr", "eigh"])
@pytest.mark.parametrize(("dtype", "power"), [(torch.float32, -2), (torch.float32, 12), (DOUBLE, -60), (DOUBLE, 60)])
def test_gradient_scale_does_not_matter(dtype: torch.dtype, power: int, method: str) -> None:
    """Gradients times a power of two give the same weights bit for bit."""
    gradients = draws(30, 5, 5, dtype=dtype)
    plain = moves((5, 5), gradients, full_rank=False, refresh_method=method)
    assert torch.equal(moves((5, 5), gradients * 2.0**power, full_rank=False, refresh_method=method), plain)


@pytest.mark.parametrize("shape", [(6, 6), (7, 4), (3, 8)])
def test_size_of_a_step(shape: tuple[int, int]) -> None:
    """Without spectral normalization the Frobenius norm is lr · 2√(mn)/(m+n), and no spectral norm above it."""
    m, n = shape
    weights = moves(shape, draws(30, m, n), full_rank=False, eps=0.0, lr=0.3, step_norm="frobenius")
    steps = weights.diff(dim=0, prepend=torch.zeros(1, m, n, dtype=DOUBLE))
    size = 0.3 * 2 * (m * n) ** 0.5 / (m + n)
    frobenius, spectral = torch.linalg.matrix_norm(steps), torch.linalg.matrix_norm(steps, 2)
    torch.testing.assert_close(frobenius, torch.full_like(frobenius, size), rtol=1e-12, atol=0)
    assert bool((spectral <= size * (1 + 1e-12)).all())


def test_first_step_is_a_scaled_sign() -> None:
    """Step 1 is taken in the identity basis: lr · 2/(m+n) · sign(G), exactly by signs; normalized, a multiple of it."""
    G = draws(1, 3, 5)
    first, soft = (
        moves((3, 5), G, full_rank=False, lr=0.3, step_norm="frobenius", normalization_decay=decay)[0]
        for decay in (0.0, 0.5)
    )
    assert torch.equal(first, -0.3 * (2 / 8 * G[0].sign()))
    torch.testing.assert_close(soft, first, rtol=1e-14, atol=0)
    normalized = moves((3, 5), G, full_rank=False, lr=0.3)[0]
    torch.testing.assert_close(normalized / normalized[0, 0], first / first[0, 0], rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(6, 6), (7, 4), (3, 8)])
def test_spectral_norm_of_a_step(shape: tuple[int, int]) -> None:
    """It is lr · 2√(mn)/(m+n) / 4 where the direction stays the same, whatever the direction's rank."""
    m, n = shape
    left, right = draws(1, m, 2)[0], draws(1, 2, n, seed=1)[0]
    for G in (draws(1, *shape)[0], left @ right, left[:, :1] @ right[:1]):
        weights = moves(shape, G.expand(60, -1, -1), lr=0.3, precondition_frequency=10**6, refresh_growth=None)
        last = weights[-1] - weights[-2]
        expected = torch.tensor(0.3 * 2 * (m * n) ** 0.5 / (m + n) / 4, dtype=DOUBLE)
        torch.testing.assert_close(torch.linalg.matrix_norm(last, 2), expected, rtol=1e-6, atol=0)


def test_spectral_factor_is_one_power_iteration() -> None:
    """Matrix by matrix: the norm of Uᵀ times the unit vector along U v; a zero direction keeps its vector."""
    U, v = draws(3, 4, 6), torch.nn.functional.normalize(draws(3, 6, seed=1), dim=1)
    U[1] = 0
    factors, after = spectral_factor(U, v)
    assert factors.shape == (3, 1, 1)
    for b in (0, 2):
        image = U[b] @ v[b]
        back = U[b].T @ (image / image.norm())
        torch.testing.assert_close(factors[b].item(), 24**0.5 / 4 / back.norm().item(), rtol=1e-12, atol=0)
        torch.testing.assert_close(after[b], back / back.norm(), rtol=0, atol=1e-14)
    assert factors[1].item() == 1
    assert torch.equal(after[1], v[1])
    for _ in range(300):
        factors, v = spectral_factor(U, v)
    torch.testing.assert_close(factors[0].item(), 24**0.5 / 4 / torch.linalg.matrix_norm(U[0], 2).item())
    assert start_vector(7).norm().item() == pytest.approx(1)


def test_a_direction_that_turns_away_from_the_power_iteration_is_normalized() -> None:
    """No step is longer than asked for when U v is zero, as of small matrices of signs, and the next is exact again."""
    U, v = torch.ones(1, 2, 2, dtype=DOUBLE), torch.tensor([[1.0, -1.0]], dtype=DOUBLE) / 2**0.5
    for _ in range(2):
        size, v = spectral_factor(U, v)
        assert size.item() * torch.linalg.matrix_norm(U, 2).item() == pytest.approx(0.5, rel=1e-14)
    torch.testing.assert_close(v.abs(), torch.full_like(v, 0.5**0.5), rtol=1e-14, atol=0)
    halves = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]], dtype=DOUBLE)
    assert spectral_factor(halves, torch.tensor([[1.0, -1.0]], dtype=DOUBLE) / 2**0.5)[0].item() == 0.25


def test_elementwise_parameters_move_by_their_constant() -> None:
    """An entry of a parameter that is not whitened moves by lr · elementwise_scale, or not at all for a zero."""
    parameter = nn.Parameter(torch.zeros(4, dtype=DOUBLE))
    optimizer = SPlus([parameter], lr=0.3, elementwise_scale=0.02, weight_decay=0.0)
    drive(optimizer, [parameter], [[torch.tensor([2.0, -1e-30, 0.0, 7.0], dtype=DOUBLE)]])
    assert torch.equal(parameter.detach(), -0.3 * (0.02 * torch.tensor([1.0, -1, 0, 1], dtype=DOUBLE)))


def test_rows_move_by_a_power_of_their_length() -> None:
    """Entries of an embedding (V, n) move by lr · scale / n ** width_power, those of a vector by lr · scale."""
    shapes = ((5, 8), (1, 4), (2, 3, 16), (8,), ())
    parameters = [nn.Parameter(torch.zeros(shape, dtype=DOUBLE)) for shape in shapes]
    optimizer = SPlus(parameters, lr=0.3, whiten=False, elementwise_scale=2.0, width_power=0.5, weight_decay=0.0)
    drive(optimizer, parameters, [[torch.ones_like(parameter) for parameter in parameters]])
    for parameter, scale in zip(parameters, (2 / 8**0.5, 2 / 2, 2 / 4, 2.0, 2.0)):
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, -0.3 * scale), rtol=1e-15, atol=0)


@pytest.mark.parametrize("settings", [{}, {"eps": 0.0, "refresh_method": "eigh"}])
def test_zero_gradients_move_nothing(settings: dict[str, Any]) -> None:
    """Without decay weights stay bit for bit under zero gradients, and no state becomes NaN."""
    parameters = [nn.Parameter(draws(1, 4, 3)[0]), nn.Parameter(draws(1, 5)[0])]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = SPlus(parameters, weight_decay=0.0, **settings)
    drive(optimizer, parameters, [[torch.zeros_like(parameter) for parameter in parameters]] * 12)
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before))
    state = optimizer.state[parameters[0]]
    assert not torch.count_nonzero(state["momentum"])
    for side, n in (("left", 4), ("right", 3)):
        assert torch.equal(state[f"basis_{side}"].abs(), torch.eye(n, dtype=DOUBLE))
    assert torch.equal(state["average"], before[0])


def test_weight_decay_alone_is_a_power() -> None:
    """Under zero gradients W_t = W_0 (1 - lr s λ)ᵗ, with s = 2/(m+n) or the elementwise scale."""
    parameters = [nn.Parameter(draws(1, 4, 3)[0]), nn.Parameter(draws(1, 5)[0])]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = SPlus(parameters, lr=0.2, weight_decay=0.5, elementwise_scale=0.03)
    drive(optimizer, parameters, [[torch.zeros_like(parameter) for parameter in parameters]] * 20)
    for parameter, old, scale in zip(parameters, before, (2 / 7, 0.03)):
        torch.testing.assert_close(parameter.detach(), old * (1 - 0.2 * scale * 0.5) ** 20, rtol=1e-14, atol=0)


def test_maximize_is_descent_on_negated_gradients() -> None:
    """maximize=True takes the very steps that negated gradients would."""
    shapes = [(4, 4), (3,)]
    starts = [draws(1, *shape, seed=3)[0] for shape in shapes]
    gradients = list(zip(*(draws(15, *shape) for shape in shapes)))
    up, down = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    drive(SPlus(up, maximize=True), up, gradients)
    drive(SPlus(down), down, [[-G for G in of_step] for of_step in gradients])
    assert all(torch.equal(a, b) for a, b in zip(up, down))
    assert not torch.equal(up[0], starts[0])


def test_learning_rate_may_be_a_tensor_and_change() -> None:
    """A tensor learning rate that is changed in place is the same as a number set at the same step."""
    gradients, lr = draws(6, 4, 4), torch.tensor(0.2, dtype=DOUBLE)
    a, b = (nn.Parameter(torch.zeros(4, 4, dtype=DOUBLE)) for _ in range(2))
    of_tensor, of_number = SPlus([a], lr=lr), SPlus([b], lr=0.2)
    for step, G in enumerate(gradients):
        lr.fill_(0.2 / (1 + step))
        of_number.param_groups[0]["lr"] = 0.2 / (1 + step)
        drive(of_tensor, [a], [[G]])
        drive(of_number, [b], [[G]])
    assert torch.equal(a, b)


@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_nothing_moves_in_the_null_space(method: str) -> None:
    """Gradients of rank 2 move nothing outside their rows and columns in fp32; without the threshold they do."""
    m, n = 24, 16
    rows, columns = orthogonal(m)[:, :2], orthogonal(n)[:, :2]
    gradients = (rows @ draws(40, 2, 2) @ columns.T).float()

    def leak(**settings: Any) -> float:
        weights = moves((m, n), gradients, full_rank=False, refresh_method=method, **settings).double()
        move = weights[-1] - weights[0]  # the first step is taken in the identity basis
        inside = rows @ (rows.T @ move @ columns) @ columns.T
        return float((move - inside).norm() / inside.norm())

    assert leak() < 1e-5
    assert leak(eps=0.0) > 0.5


@pytest.mark.parametrize(("rule", "scale"), [("shape", 2 / 7), ("fan_in", 1 / 3), ("none", 1.0)])
def test_step_scale_is_the_rule_asked_for(rule: str, scale: float) -> None:
    """A whitened 4×3 matrix follows the reference with 2/(m+n), 1/n or 1; blocks have the scale of the whole."""
    parameter = nn.Parameter(draws(1, 4, 3)[0])
    optimizer = SPlus([parameter], lr=0.2, step_scale=rule)
    reference = Reference(parameter, lr=0.2, scale=scale)
    for G in draws(12, 4, 3):
        drive(optimizer, [parameter], [[G]])
        reference.step(G)
    torch.testing.assert_close(parameter.detach(), reference.W, rtol=0, atol=1e-10)
    G = draws(1, 4, 3, seed=3)[0]
    blocks = nn.Parameter(torch.zeros(4, 3, dtype=DOUBLE))
    settings: dict[str, Any] = {"weight_decay": 0.0, "step_scale": rule, "step_norm": "frobenius"}
    drive(SPlus([blocks], 0.2, whiten=True, max_preconditioner_dim=2, **settings), [blocks], [[G]])
    torch.testing.assert_close(blocks.detach(), -0.2 * scale * G.sign(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("width", [64, 1024])
def test_unscaled_weight_decay_does_not_follow_the_width(width: int) -> None:
    """Under zero gradients W shrinks by lr · λ a step, or with the shape scale by that over the width of a square."""
    for scaled, rate in ((False, 0.2 * 0.1), (True, 0.2 * 0.1 / width)):
        parameters = [nn.Parameter(torch.ones(width, width)), nn.Parameter(torch.ones(5))]
        groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:], "whiten": False}]
        optimizer = SPlus(groups, lr=0.2, weight_decay=0.1, scale_weight_decay=scaled, elementwise_scale=0.03)
        drive(optimizer, parameters, [[torch.zeros_like(parameter) for parameter in parameters]])
        torch.testing.assert_close(parameters[0].detach(), torch.full((width, width), 1 - rate), rtol=1e-6, atol=0)
        elementwise = 0.2 * 0.1 * (0.03 if scaled else 1)
        torch.testing.assert_close(parameters[1].detach(), torch.full((5,), 1 - elementwise), rtol=1e-6, atol=0)
