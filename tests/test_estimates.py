"""What a few seeds say: intervals by every resample, and paired differences as scipy has them."""

import math

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.estimates import estimate, mean_over, paired_difference
from benchmarks.table import estimate_text


def test_the_interval_of_two_values_is_between_them() -> None:
    """One of the four resamples has the lower twice, one the higher."""
    found = estimate([0.5, 0.7])
    assert (found.mean, found.missing, found.total, found.values) == (pytest.approx(0.6), 0, 2, (0.5, 0.7))
    assert (found.low, found.high) == (0.5, 0.7)


@pytest.mark.parametrize("count", [3, 6, 8])
def test_the_interval_is_that_of_a_bootstrap_with_many_draws(count: int) -> None:
    """Six values and fewer in every way there is, more by draws."""
    values = np.random.default_rng(count).normal(size=count)
    drawn = np.random.default_rng(1).choice(values, (200_000, count)).mean(axis=1)
    found = estimate(list(values))
    assert (found.low, found.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.03)


def test_values_that_are_not_there_are_counted() -> None:
    found = estimate([0.5, None, 0.7, math.inf])
    assert (found.mean, found.missing, found.total, found.complete) == (pytest.approx(0.6), 2, 4, False)
    nothing = estimate([])
    assert math.isnan(nothing.mean)
    assert not nothing.complete


def test_the_mean_over_groups_weighs_them_alike() -> None:
    """A group of one value has no spread; the interval of two groups is narrower than that of the wider."""
    groups = [[1.0], [0.2, 0.4, 0.6, 0.8]]
    found, wider = mean_over(groups), estimate(groups[1])
    assert found.mean == pytest.approx(0.75)
    assert found.low == pytest.approx((1 + wider.low) / 2, abs=0.02)
    assert found.high == pytest.approx((1 + wider.high) / 2, abs=0.02)
    assert math.isnan(mean_over([[1.0], []]).mean)


def test_a_paired_difference_is_that_of_students_test() -> None:
    values, others = [1.0, 2.0, 4.0, 3.5], [0.5, 1.9, 3.0, 3.4]
    found = paired_difference(values, others)
    expected = stats.ttest_rel(values, others)
    assert found is not None
    assert (found.mean, found.p, found.pairs) == (pytest.approx(0.425), pytest.approx(expected.pvalue), 4)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.significant == (expected.pvalue < 0.05)


def test_a_run_without_a_loss_takes_its_pair_with_it() -> None:
    found = paired_difference([1.0, None, 3.0, math.inf], [0.5, 1.0, 2.0, 1.0])
    assert found is not None
    assert (found.mean, found.pairs) == (0.75, 2)
    assert paired_difference([1.0, None], [0.5, 1.0]) is None


def test_differences_without_a_spread_are_certain() -> None:
    found = paired_difference([1.0, 2.0], [0.5, 1.5])
    assert found is not None
    assert (found.mean, found.low, found.high, found.p) == (0.5, 0.5, 0.5, 0.0)
    same = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert same is not None
    assert (same.mean, same.p) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5, 0.5], ("0.50", "")),
        ([0.5, 0.54], ("0.52", "0.50–0.54")),
        ([0.5, None], ("> 1", "in 1 of 2, else 0.50")),
        ([None], ("> 1", "")),
        ([], ("–", "")),
    ],
)
def test_an_estimate_in_words(values: list[float | None], text: tuple[str, str]) -> None:
    assert estimate_text(estimate(values), "> 1") == text
