"""How many examples property tests draw, and the end of the processes that tests have started."""

import pytest
import ranks
from hypothesis import Phase, settings

# "suite" draws the same ones in every run, `--hypothesis-profile=fuzz` new ones.
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=150, stateful_step_count=15)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=4000,
    stateful_step_count=40,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    ranks.stop()
