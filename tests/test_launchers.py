"""Where runs take place: the threads of local processes, jobs of submitit, Slurm's commands, Hydra's own launchers."""

import json
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import submitit
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from runs import ROOT

from benchmarks.cells import Cell, last_metrics
from benchmarks.command import SettingError, executor_from
from benchmarks.jobs import Jobs
from benchmarks.machine import thread_limits
from benchmarks.pool import Pool
from benchmarks.sweep import run_cells


def cells(*seeds: int) -> list[Cell]:
    return [Cell(f"seed{seed}", ("preset=smoke", f"seed={seed}")) for seed in seeds]


def job_run(config: DictConfig, directory: Path) -> dict[str, Any]:
    """Crashes with seed 1, is killed with seed 2, preempted with seed 3, the last two at their first start only."""
    starts = directory / "starts.txt"
    with open(starts, "a") as file:
        file.write("start\n")
    print("a job prints this")
    first = len(starts.read_text().splitlines()) == 1
    if config.seed == 1:
        raise ValueError("no such luck")
    if config.seed in (2, 3) and first:
        os.kill(os.getpid(), {2: signal.SIGKILL, 3: signal.SIGUSR2}[int(config.seed)])
    threads = {} if "torch" in sys.modules else {name: os.environ.get(name) for name in thread_limits(1)}
    result = {"status": "finished", "seconds": 1.0, "final": {}, "threads": threads}
    (directory / "result.json").write_text(json.dumps(result))
    return result


def starts(directory: Path) -> int:
    return len((directory / "starts.txt").read_text().splitlines())


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs find this module."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))


def local_jobs() -> Jobs:
    return Jobs("local", workers=4, cpus_per_task=3, timeouts=1, run=job_run, timeout_min=5, gpus_per_node=0)


def test_jobs_crash_are_killed_and_resumed_and_preempted_without_harm_to_the_rest(
    tmp_path: Path, importable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash and a death are shown with their causes; a preempted job goes on by itself, a killed one when asked."""
    monkeypatch.setattr(submitit.LocalJob, "_results_timeout_s", 0)  # no slow file system here
    crashed, killed, preempted, finished = wanted = cells(1, 2, 3, 4)
    outcomes = run_cells(lambda known: wanted, tmp_path, local_jobs())
    assert [outcomes[cell].status for cell in wanted] == ["crashed", "crashed", "finished", "finished"]
    assert "ValueError: no such luck" in (outcomes[crashed].directory / "error.txt").read_text()
    last = (outcomes[killed].directory / "error.txt").read_text().splitlines()[-1]
    assert last.endswith(f"ended without a result. What it printed is in {outcomes[killed].directory.name}/log.txt.")
    assert "a job prints this" in (outcomes[killed].directory / "log.txt").read_text()
    assert outcomes[finished].result["threads"] == thread_limits(3)

    again = run_cells(lambda known: [killed, preempted, finished], tmp_path, local_jobs())
    assert {outcome.status for outcome in again.values()} == {"finished"}
    assert not (again[killed].directory / "error.txt").exists()
    assert [starts(again[cell].directory) for cell in (killed, preempted, finished)] == [2, 2, 1]


def test_a_job_that_is_told_to_end_leaves_a_checkpoint(
    tmp_path: Path, importable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM, as Slurm does it; written at once, long before the next regular one."""
    monkeypatch.setattr(submitit.LocalJob, "_results_timeout_s", 0)
    jobs = Jobs("local", workers=1, timeout_min=5)
    cell = Cell("long", ("preset=smoke", "steps=100000", "evaluate_every=100000", "checkpoint_every=100000"))
    with closing(jobs):
        jobs.start(cell, tmp_path)
        while last_metrics(tmp_path)[0] == 0:
            assert jobs.collect(0.01) == []
        os.kill(int((tmp_path / "jobs" / "number").read_text()), signal.SIGTERM)
        ended = next(filter(None, (jobs.collect(0.01) for _ in range(6000))), None)
    assert ended is not None, "the job goes on as if it had not been told"
    assert [(item.cell, item.result) for item in ended] == [(cell, None)]
    assert "Stopped at step" in (tmp_path / "log.txt").read_text()
    assert list(tmp_path.glob("checkpoint-*"))


def test_threads_of_local_processes_are_set_before_torch_is_imported(tmp_path: Path) -> None:
    (cell,) = wanted = cells(4)
    outcomes = run_cells(lambda known: wanted, tmp_path, Pool(1, threads=3, run=job_run))
    assert outcomes[cell].result["threads"] == thread_limits(3)


SLURM = {
    "srun": "",
    "sbatch": 'cp "$1" {log}/sbatch.txt; echo sbatch >> {log}/calls.txt; echo Submitted batch job 12',
    "sacct": 'echo "JobID|State|NodeList"; echo "12|$(cat {log}/state.txt)|node1"',
    "scancel": 'echo scancel "$1" >> {log}/calls.txt; echo CANCELLED > {log}/state.txt',
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the commands of a Slurm leave their calls, with one job, in the state of state.txt."""
    (tmp_path / "bin").mkdir()
    for name, script in SLURM.items():
        path = tmp_path / "bin" / name
        path.write_text("#!/bin/sh\n" + script.format(log=tmp_path) + "\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
    (tmp_path / "state.txt").write_text("RUNNING")
    return tmp_path


def launcher(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf" / "comparison"), version_base="1.3"):
        return compose("compare", overrides=list(overrides))


def calls(slurm: Path) -> list[str]:
    return (slurm / "calls.txt").read_text().splitlines()


def test_slurm_is_asked_for_what_the_launcher_says(slurm: Path) -> None:
    settings = ("partition=short", "timeout_min=90", "cpus_per_task=2", "mem_gb=3", "gpus_per_node=1")
    extra = "+launcher.extra.constraint=h200"
    config = launcher("launcher=submitit_slurm", "workers=7", extra, *(f"launcher.{setting}" for setting in settings))
    jobs = executor_from(config)
    assert jobs.workers == 7
    jobs.start(cells(4)[0], slurm / "cell")
    asked = (slurm / "sbatch.txt").read_text().splitlines()
    options = ("partition=short", "time=90", "cpus-per-task=2", "mem=3GB", "gpus-per-node=1", "constraint=h200")
    assert {f"#SBATCH --{option}" for option in (*options, "job-name=seed4")} <= set(asked)
    assert " ".join(f"{name}=2" for name in thread_limits(2)) in asked[-1]


def test_jobs_of_a_killed_command_are_found_again_and_cancelled_at_the_end(slurm: Path) -> None:
    """A job that Slurm still has is not submitted twice; one that it no longer has is submitted anew."""
    (cell,) = cells(4)
    for _ in range(2):  # commands, of which the first one is never closed
        submitit.SlurmJob.watcher.clear()
        jobs = Jobs("slurm", workers=1)
        jobs.start(cell, slurm / "cell")
        assert jobs.collect(0) == []
    jobs.close()
    assert calls(slurm) == ["sbatch", "scancel 12"]
    for state in ("CANCELLED", ""):  # and forgotten by the accounting
        submitit.SlurmJob.watcher.clear()
        (slurm / "state.txt").write_text(state)
        Jobs("slurm", workers=1).start(cell, slurm / "cell")
    assert calls(slurm) == ["sbatch", "scancel 12", "sbatch", "sbatch"]


def test_a_launcher_that_is_not_possible_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SettingError, match=r"there is no sbatch here; .* launcher=local"):
        executor_from(launcher("launcher=submitit_slurm"))
    with pytest.raises(SettingError, match="workers=0 given; at least 1 is required"):
        executor_from(launcher("launcher=submitit_local", "workers=0"))


def test_every_cell_is_one_run_of_its_group_in_weights_and_biases(tmp_path: Path) -> None:
    """Also when it is resumed; and the group does not change what is trained."""
    from train.record import Record

    cell = Cell("a", ("preset=smoke", "wandb.mode=offline"), group="language_modelling/adam/64")
    directory = cell.directory(tmp_path)
    directory.mkdir()
    ids = set()
    for resumed_at in (None, 4):
        with Record(directory, cell.config, resumed_at) as record:
            assert (record.wandb.group, record.wandb.name) == (cell.group, directory.name)
            assert record.wandb.offline
            ids.add(record.wandb.id)
    assert ids == {f"{directory.name}-{cell.hash}"}
    assert cell.hash == Cell("a", ("preset=smoke",)).hash
