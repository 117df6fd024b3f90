"""How many examples property tests draw: the same ones in every run, or with ``--hypothesis-profile=fuzz`` new ones."""

from hypothesis import Phase, settings

settings.register_profile("suite", derandomize=True, deadline=None, max_examples=150, stateful_step_count=15)
settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=4000,
    stateful_step_count=40,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("suite")
