"""Accelerate and Lightning on two processes that share the work, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_trainer_on_two_processes_is_one_on_the_whole_batch(trainer: str) -> None:
    """With clipped gradients; Accelerate accumulates, Lightning validates and ends with the averages. Ten seconds."""
    tests = Path(__file__).parent
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launcher, str(tests / "launched.py"), trainer],
        env=os.environ | {"PYTHONPATH": f"{tests.parent}:{tests}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    for rank in range(2):
        assert f"rank {rank} of 2 as one" in run.stdout, run.stderr
