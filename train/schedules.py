"""Learning rate schedules: the factor on the learning rate of step 0, 1, 2, …"""

from collections.abc import Callable

Schedule = Callable[[int], float]


def constant(warmup: int) -> Schedule:
    """Linear warmup over ``warmup`` steps, then constant (the paper's schedule, with a warmup of 200)."""
    return lambda step: min(1.0, (step + 1) / max(1, warmup))


def linear_decay(warmup: int, steps: int) -> Schedule:
    """Linear warmup over ``warmup`` steps, then linearly to zero at step ``steps``."""
    if steps <= warmup:
        raise ValueError(f"schedule.warmup={warmup} leaves nothing of steps={steps} to decay over; make it smaller")
    return lambda step: min((step + 1) / max(1, warmup), (steps - step) / (steps - warmup))
