"""Steps-to-Adam and time-to-Adam as defined: on curves whose crossings are known."""

import math
import random

import pytest

from benchmarks.steps_to_adam import (
    Crossing,
    Curve,
    crossing,
    seconds_per_step,
    steps_to,
    time_to,
)


def curve(*losses: float, seconds_per_step: float = 0.1) -> Curve:
    """A curve evaluated every 10 steps."""
    steps = tuple(10 * i for i in range(len(losses)))
    return Curve(steps, tuple(seconds_per_step * step for step in steps), losses)


def test_crossing_is_interpolated_in_steps_and_on_the_clock() -> None:
    bent = Curve((0, 10, 20), (0.0, 1.0, 5.0), (4.0, 3.0, 1.0))
    assert crossing(bent, 2.0) == Crossing(15.0, 3.0)
    assert crossing(bent, 2.5) == Crossing(12.5, 2.0)


def test_crossing_at_an_evaluation_is_that_evaluation() -> None:
    assert crossing(curve(4, 3, 2, 1), 2.0) == Crossing(20.0, 2.0)


def test_a_dip_that_is_not_kept_does_not_count() -> None:
    assert crossing(curve(4, 1, 5, 3, 1), 2.0) == Crossing(35.0, 3.5)
    assert crossing(curve(4, 1, 5, 3, 3), 2.0) is None


def test_a_later_loss_above_the_target_is_allowed_if_the_mean_is_not() -> None:
    assert crossing(curve(4, 2, 2.4, 1, 1), 2.0) == Crossing(10.0, 1.0)


def test_a_target_reached_only_at_the_end_counts_and_one_never_reached_does_not() -> None:
    assert crossing(curve(4, 3, 2), 2.0) == Crossing(20.0, 2.0)
    assert crossing(curve(4, 3, 2), 1.9) is None


def test_a_run_that_starts_at_the_target_needs_no_steps() -> None:
    assert crossing(curve(2, 1, 1), 2.0) == Crossing(0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_never_reach_anything(bad: float) -> None:
    assert crossing(curve(4, 1, bad), 2.0) is None
    assert crossing(curve(4, bad, 1, 1), 2.0) == Crossing(20.0, 2.0)


def test_the_evaluation_before_a_crossing_is_above_the_target() -> None:
    draw = random.Random(0)
    for _ in range(300):
        losses = [draw.uniform(0, 2) for _ in range(8)]
        point = crossing(curve(*losses), 1.0)
        if point is not None and point.step > 0:
            before = math.ceil(point.step / 10) - 1
            assert losses[before] > 1.0 >= losses[before + 1]


def test_adam_takes_all_of_its_own_steps_and_time() -> None:
    adam = curve(4, 3, 2.5, 2.2)
    assert steps_to(adam, adam.losses[-1], adam) == 1.0
    assert time_to(adam, adam.losses[-1], adam) == 1.0


def test_half_the_steps_at_twice_the_pace_is_the_same_time() -> None:
    adam, fast = curve(4, 3.5, 3, 2.5, 2), curve(4, 3, 2, 1.5, 1, seconds_per_step=0.2)
    assert steps_to(fast, 2.0, adam) == 0.5
    assert time_to(fast, 2.0, adam) == pytest.approx(1.0)
    assert steps_to(adam, 1.0, adam) is None
    assert time_to(adam, 1.0, adam) is None


def test_seconds_per_step_ignores_a_disturbed_interval() -> None:
    calm, disturbed = curve(4, 3, 2, 1), Curve((0, 10, 20), (0.0, 1.0, 99.0), (4.0, 3.0, 2.0))
    assert seconds_per_step([calm, disturbed]) == pytest.approx(0.1)
    assert math.isnan(seconds_per_step([]))
