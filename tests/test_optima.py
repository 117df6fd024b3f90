"""The best learning rate of a width and its drift, on curves whose minimum is known."""

import math
from collections.abc import Callable

import pytest

from benchmarks import optima
from benchmarks.optima import Optimum

Curve = Callable[[int], float | None]


def parabola(octaves: float, depth: float = 1.0, curvature: float = 0.1) -> Curve:
    """A loss that is least at 2**octaves."""
    return lambda index: depth + curvature * (index / 2 - octaves) ** 2


def tried(curve: Curve, start: int = 0, limit: int = 30, further: bool = False) -> list[int]:
    """The indices of a search when everything that it asks for is run."""
    find, known = (optima.further_indices if further else optima.search), dict[int, float | None]()
    while True:
        indices, over = find(start, limit, known.__getitem__)
        if over:
            return indices
        known |= {index: curve(index) for index in indices}


def test_rates_are_two_an_octave() -> None:
    assert [optima.rate(index) for index in (-2, -1, 0, 1, 2)] == [0.5, 0.7071, 1.0, 1.414, 2.0]
    assert [optima.nearest_index(optima.rate(index)) for index in range(-20, 5)] == list(range(-20, 5))
    with pytest.raises(ValueError, match="a positive number is required"):
        optima.nearest_index(0.0)


@pytest.mark.parametrize("octaves", [-4.2, -1.0, 0.0, 0.3, 0.74, 3.5])
def test_the_search_brackets_the_best_on_either_side_twice(octaves: float) -> None:
    indices = tried(parabola(octaves))
    centre = min(indices, key=lambda index: parabola(octaves)(index) or 0)
    assert abs(centre / 2 - octaves) <= 0.25
    assert {centre - 2, centre - 1, centre + 1, centre + 2} <= set(indices)
    assert len(indices) == len(set(indices))


def test_a_further_seed_is_searched_around_the_first_ones_best() -> None:
    assert sorted(tried(parabola(0.0), start=0, further=True)) == [-1, 0, 1]
    assert sorted(tried(parabola(1.0), start=0, further=True)) == [-1, 0, 1, 2, 3]


def test_a_search_ends_at_its_limit_and_says_so() -> None:
    falling = lambda index: -float(index)  # noqa: E731
    indices = tried(falling, limit=5)
    assert len(indices) == 5
    found = optima.optimum([{index: falling(index) for index in indices}])
    assert found is not None
    assert not found.bracketed
    assert 2 * found.octaves == max(indices)


def test_diverged_runs_send_the_search_down_and_bracket() -> None:
    def curve(index: int) -> float:
        return math.inf if index > -5 else -float(index)

    indices = tried(curve)
    assert max(index for index in indices if curve(index) < math.inf) == -5
    found = optima.optimum([{index: curve(index) for index in indices}])
    assert found is not None
    assert found.bracketed


def test_the_minimum_is_interpolated_between_the_rates() -> None:
    """Exactly, for parabolas: of each seed its own, whatever its level."""
    seeds = [{index: parabola(at, depth)(index) for index in range(-3, 4)} for at, depth in ((0.1, 1.0), (0.37, 2.0))]
    found = optima.optimum(seeds)
    assert found is not None
    assert found.by_seed == pytest.approx((0.1, 0.37))
    assert (found.low, found.high) == pytest.approx((0.1, 0.37))
    assert found.bracketed
    assert found.index == 0


def test_a_seed_whose_best_is_at_the_edge_is_not_bracketed() -> None:
    inside, edge = ({index: parabola(0.0)(index) for index in indices} for indices in ((-1, 0, 1), (0, 1, 2)))
    assert optima.optimum([inside]).bracketed  # type: ignore[union-attr]
    assert not optima.optimum([inside, edge]).bracketed  # type: ignore[union-attr]
    assert not optima.optimum([{-1: 1.1, 0: 1.0, 1: None}]).bracketed  # type: ignore[union-attr]


def test_without_a_finite_loss_there_is_no_optimum() -> None:
    assert optima.optimum([{0: math.inf, -1: None}]) is None
    assert optima.optimum([]) is None


@pytest.mark.parametrize("slope", [-1.0, 0.0, 0.25])
def test_drift_is_the_slope_per_doubling(slope: float) -> None:
    """With no spread the interval is a point; seeds that differ widen it and it still holds the slope."""
    exact = {32 * 2**i: Optimum((slope * i, slope * i), True) for i in range(4)}
    found = optima.drift(exact)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((slope, slope, slope), abs=1e-9)
    spread = {width: Optimum((best.octaves - 0.2, best.octaves + 0.2), True) for width, best in exact.items()}
    found = optima.drift(spread)
    assert found is not None
    assert found.value == pytest.approx(slope)
    assert found.low < slope - 0.1 < slope + 0.1 < found.high


def test_drift_needs_two_widths() -> None:
    assert optima.drift({}) is None
    assert optima.drift({64: Optimum((0.0, 0.1), True)}) is None
    two = optima.drift({64: Optimum((0.0,), True), 128: Optimum((1.0,), True)})
    assert two is not None
    assert (two.value, two.low, two.high) == (1.0, -math.inf, math.inf)
