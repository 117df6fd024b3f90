"""Runs on several processes: the losses of one process, one log, and checkpoints that continue anywhere."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from runs import OBJECTIVES, smoke

import train.objectives
from train.loop import run
from train.parallel import Ranks, shard_size
from train.trainer import Trainer, generator

MODES = [("ddp", 2), ("fsdp", 2), ("hsdp", 4)]
EQUAL = {"abs": 1e-4}
STEPS = 12


def losses(directory: Path) -> list[tuple]:
    """Of every step, and what every evaluation measured."""
    metrics = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    about = ("kind", "step", "weights", "seconds", "lr")
    return [
        (tuple(line.get(k) for k in about[:3]), {k: v for k, v in line.items() if k not in about}) for line in metrics
    ]


def assert_equal_losses(directory: Path, alone: Path) -> None:
    assert [key for key, _ in losses(directory)] == [key for key, _ in losses(alone)]
    for (key, found), (_, expected) in zip(losses(directory), losses(alone)):
        assert found == pytest.approx(expected, **EQUAL), key


def run_on_rank(rank: int, directory: Path, *settings: str) -> dict:
    return run(smoke(*settings), directory, progress=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The directory of a run of one process, which is run once."""
    directories: dict[tuple[str, ...], Path] = {}

    def directory_of(*settings: str) -> Path:
        if settings not in directories:
            directories[settings] = tmp_path_factory.mktemp("alone")
            run(smoke(*settings), directories[settings], progress=False)
        return directories[settings]

    return directory_of


@pytest.mark.parametrize(
    ("objective", "mode", "ranks"),
    [*((objective, *mode) for objective in OBJECTIVES for mode in MODES[:2]), ("diffusion", *MODES[2])],
)
def test_losses_of_one_process(tmp_path, alone, objective, mode, ranks):
    """Of every step and of every set of weights, in one log; the files and the result are those of one process too."""
    results = on_ranks(ranks, run_on_rank, tmp_path, objective, "adam", f"parallel={mode}")
    reference = alone(objective, "adam")
    assert_equal_losses(tmp_path, reference)
    assert all(result == results[0] for result in results)
    found, expected = (json.loads((directory / "result.json").read_text()) for directory in (tmp_path, reference))
    assert found == results[0]
    of_rounding = {"seconds": 0, "hash": "", "final": {}}
    assert found | of_rounding == expected | of_rounding
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in reference.iterdir()}


@pytest.mark.parametrize(("objective", "mode"), [("language_modelling", "ddp"), ("diffusion", "fsdp")])
def test_splus_has_the_losses_of_one_process(tmp_path, alone, objective, mode):
    """Where one process adds up the gradients of the same halves: a sign can turn on a last digit of theirs."""
    settings = (objective, "splus", "micro_batch=8")
    on_ranks(2, run_on_rank, tmp_path, *settings, f"parallel={mode}")
    assert_equal_losses(tmp_path, alone(*settings))


def test_splus_on_four_ranks_has_the_losses_of_two(tmp_path):
    """Whose gradients of two parts each are added up as those of the four are: by pairs."""
    settings = ("image_classification", "splus", "micro_batch=4")
    on_ranks(4, run_on_rank, tmp_path / "four", *settings, "parallel=hsdp")
    on_ranks(2, run_on_rank, tmp_path / "two", *settings, "parallel=ddp")
    assert_equal_losses(tmp_path / "four", tmp_path / "two")


@pytest.mark.parametrize(("mode", "ranks"), MODES[:2])
def test_micro_batches(tmp_path, alone, mode, ranks):
    """Gradients of the parts add up to those of the whole; parts are unequal."""
    settings = ("image_classification", "adam")
    on_ranks(ranks, run_on_rank, tmp_path, *settings, f"parallel={mode}", "micro_batch=3")
    assert_equal_losses(tmp_path, alone(*settings))


def gradients(rank: int, mode: str, micro_batch: int) -> tuple[float, int]:
    """The loss, and how often a backward pass has communicated."""
    trainer = Trainer(smoke("language_modelling", "adam", f"parallel={mode}", f"micro_batch={micro_batch}"))
    with torch.profiler.profile() as profiled:
        loss = trainer.backward(trainer.objective.batch(16, generator(0)))
    events = profiled.key_averages()
    reductions = ("gloo:all_reduce", "gloo:reduce_scatter", "c10d::_reduce_scatter_base_", "c10d::allreduce_")
    return loss, sum(event.count for event in events if event.key in reductions)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_gradients_travel_once_a_step(mode):
    whole, parts = (on_ranks(2, gradients, mode, size)[0] for size in (8, 2))
    assert parts[1] == whole[1] > 0


def stopped_at(rank: int, step: int, directory: Path, *settings: str) -> int:
    """Run until the last rank receives SIGTERM in a step; the exit code."""
    last = rank == Ranks.of(smoke(*settings)).number - 1

    class Stopped(Trainer):
        def backward(self, batch: tuple) -> float:
            if last and self.step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().backward(batch)

    train.loop.Trainer = Stopped  # type: ignore[misc]
    try:
        run(smoke(*settings), directory, progress=False)
    except SystemExit as stop:
        return int(str(stop.code))
    finally:
        train.loop.Trainer = Trainer  # type: ignore[misc]
    return 0


MOVES = {
    "adam": [("fsdp", 2), ("hsdp", 4), ("none", 1), ("ddp", 4)],
    "splus": [("fsdp", 2), ("none", 1), ("hsdp", 2), ("ddp", 2)],  # that add up the same halves
}


@pytest.mark.parametrize("optimizer", MOVES)
def test_a_stopped_run_goes_on_at_another_world_size_and_mode(tmp_path, alone, optimizer):
    """A signal to one rank stops all after the same step; the run continues elsewhere as if uninterrupted."""
    settings = ("diffusion", optimizer, "micro_batch=8")
    for step, (mode, ranks) in zip((2, 5, 7, STEPS + 1), MOVES[optimizer]):
        arguments = (step, tmp_path, *settings, f"parallel={mode}")
        codes = on_ranks(ranks, stopped_at, *arguments) if ranks > 1 else [stopped_at(0, *arguments)]
        assert codes == [128 + signal.SIGTERM if step <= STEPS else 0] * ranks
        assert [path.name for path in tmp_path.glob("checkpoint*")] == [f"checkpoint-{step}"] * (step <= STEPS)
    assert_equal_losses(tmp_path, alone(*settings))


def test_one_rank_resumes_bit_for_bit_what_it_saved(tmp_path):
    """Also in a process group: what several ranks need changes nothing for one."""
    settings = ("language_modelling", "splus")
    assert on_ranks(1, stopped_at, 5, tmp_path / "stopped", *settings, "parallel=fsdp") == [128 + signal.SIGTERM]
    (stopped,) = on_ranks(1, run_on_rank, tmp_path / "stopped", *settings, "parallel=ddp")
    whole = run(smoke(*settings), tmp_path / "whole", progress=False)
    assert stopped["hash"] == whole["hash"]


def test_divergence_ends_the_run_on_all_ranks(tmp_path):
    settings = ("image_classification", "adam", "optimizer.lr=1e6", "parallel=fsdp")
    first, second = on_ranks(2, run_on_rank, tmp_path, *settings)
    assert (first["status"], first["final"]) == ("diverged", {})
    assert first == second


def measures(rank: int, mode: str) -> dict[str, float]:
    train.objectives.EVALUATION_BATCH, before = 7, train.objectives.EVALUATION_BATCH
    try:
        return Trainer(smoke("image_classification", "adam", f"parallel={mode}", "validation_examples=30")).measures()
    finally:
        train.objectives.EVALUATION_BATCH = before


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_every_held_out_example_counts_once(mode):
    """Also where ranks have unequally many: 30 = 8 + 8 + 7 + 7, in batches of 7."""
    everyone = on_ranks(4, measures, mode)
    assert everyone == [pytest.approx(measures(0, "none"))] * 4


# Errors


def message(rank: int, directory: Path, *settings: str) -> str:
    try:
        run(smoke(*settings), directory, progress=False)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


ERRORS = {
    ("parallel=none",): "2 processes were started with parallel=none, and each would write the same directory",
    ("parallel=ddp", "batch_size=15"): "batch_size=15 does not divide by the 2 processes; set batch_size=16",
    (
        "parallel=hsdp",
        "parallel.shard_size=3",
    ): "parallel.shard_size=3 does not divide the 2 processes; set one of 1, 2",
}


@pytest.mark.parametrize("settings", ERRORS)
def test_wrong_settings_are_refused_on_every_rank(tmp_path, settings):
    for found in on_ranks(2, message, tmp_path, "language_modelling", "adam", *settings):
        assert ERRORS[settings] in found


def test_an_optimizer_that_needs_whole_matrices_is_refused_on_every_rank(tmp_path):
    for found in on_ranks(2, message, tmp_path, "language_modelling", "soap", "parallel=fsdp"):
        assert "pytorch_optimizer.SOAP does not work with parallel=fsdp" in found


def test_an_error_of_the_first_rank_is_one_of_all(tmp_path):
    """Nobody waits for a rank that has raised."""
    run(smoke(), tmp_path, progress=False)
    for found in on_ranks(2, message, tmp_path, "language_modelling", "adam", "parallel=ddp", "seed=1"):
        assert "holds a run of another configuration (differing in: seed)" in found


def test_parallel_needs_torchrun_and_torchrun_needs_parallel(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"start them with: torchrun --nproc-per-node=2 -m train parallel=fsdp"):
        run(smoke("diffusion", "adam", "parallel=fsdp"), tmp_path, progress=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started with parallel=none"):
        run(smoke(), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_groups_of_hsdp_are_nodes_where_there_are_several(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 32)
    assert shard_size(None) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert shard_size(None) == 8
    assert shard_size(16) == 16
