"""Cells as jobs of a cluster, submitted with submitit."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit
from omegaconf import OmegaConf

from benchmarks.attempt import Run, attempt, train_cell
from benchmarks.machine import thread_limits
from benchmarks.sweep import POLL_SECONDS, Ended, Task

CLUSTERS: dict[str, type[submitit.Job[Any]]] = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}
STOP_SECONDS = 20.0  # the longest to wait for cancelled jobs to write their checkpoints


class Jobs:
    """Up to `workers` jobs in the queue. The files of a cell's jobs are in the folder "jobs" of its directory.

    Args:
        cluster: "slurm", or "local" for processes that are handled like jobs.
        cpus_per_task: also the number of torch's threads.
        timeouts: how often a job that has reached its time limit is queued again; it continues from its checkpoint.
        partition: of Slurm; None: its default.
        extra: further parameters of sbatch.
        resources: what else submitit asks for, such as `timeout_min` and `mem_gb`.
        run: what a job does with a configuration and a directory; importable by name.
    """

    def __init__(
        self,
        cluster: str,
        workers: int,
        cpus_per_task: int = 1,
        timeouts: int = 0,
        partition: str | None = None,
        extra: Mapping[str, Any] | None = None,
        run: Run = train_cell,
        **resources: Any,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers} given; at least 1 is required")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ValueError("there is no sbatch here; start this on a login node of Slurm, or with launcher=local")
        self.cluster, self.workers, self.run = cluster, workers, run
        variables = " ".join(f"{name}={value}" for name, value in thread_limits(cpus_per_task).items())
        self._made_with = {
            f"{cluster}_python": f"env {variables} {shlex.quote(sys.executable)}",
            f"{cluster}_max_num_timeout": timeouts,
        }
        self._parameters = {
            "cpus_per_task": cpus_per_task,
            "slurm_partition": partition,
            "slurm_additional_parameters": dict(extra or {}),
            **resources,
        }
        self._jobs: dict[Task, tuple[submitit.Job[Any], Path]] = {}

    def start(self, cell: Task, directory: Path) -> None:
        job = self._queued_earlier(directory) or self._submit(cell, directory)
        self._jobs[cell] = (job, directory)

    def collect(self, timeout: float) -> list[Ended]:
        done = [cell for cell, (job, _) in self._jobs.items() if job.done()]
        if not done:
            time.sleep(timeout)
        return [_ended(cell, *self._jobs.pop(cell)) for cell in done]

    def close(self) -> None:
        for job, _ in self._jobs.values():
            job.cancel(check=False)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and not all(job.done(force_check=True) for job, _ in self._jobs.values()):
            time.sleep(POLL_SECONDS)
        self._jobs = {}

    def _submit(self, cell: Task, directory: Path) -> submitit.Job[Any]:
        queue = submitit.AutoExecutor(directory / "jobs", self.cluster, **self._made_with)
        queue.update_parameters(name=cell.name, **self._parameters)
        job = queue.submit(CellJob(self.run, OmegaConf.to_container(cell.config), directory.resolve()))
        _number(directory).write_text(job.job_id)
        return job

    def _queued_earlier(self, directory: Path) -> submitit.Job[Any] | None:
        """The job of a command that was killed, which waits or runs still."""
        if not _number(directory).exists():
            return None
        job = CLUSTERS[self.cluster](directory / "jobs", _number(directory).read_text())
        # Slurm's accounting does not know jobs that it has forgotten.
        return None if job.done(force_check=True) or job.state == "UNKNOWN" else job


class CellJob:
    """What a job does. Queued again, it does the same: the cell's directory has the checkpoint to continue from."""

    def __init__(self, run: Run, config: Any, directory: Path) -> None:
        self.run, self.config, self.directory = run, config, directory

    def __call__(self) -> tuple[dict[str, Any] | None, str]:
        return attempt(self.run, self.config, self.directory)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called by submitit on SIGUSR2, in the middle of whatever the job does."""
        return submitit.helpers.DelayedSubmission(self)


def _number(directory: Path) -> Path:
    """The file that holds the number of a cell's last job."""
    return directory / "jobs" / "number"


def _ended(cell: Task, job: submitit.Job[Any], directory: Path) -> Ended:
    failure = job.exception()
    if failure is None:
        return Ended(cell, *job.result())
    log = f"{directory.name}/log.txt"
    return Ended(cell, None, f"{failure}\nJob {job.job_id} ended without a result. What it printed is in {log}.\n")
