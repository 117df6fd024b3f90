"""Measurements, run from a checkout: `python -m benchmarks.<name>`."""

import os

# The profiler, which tracks allocations, has lines for its own developers on the terminal otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
