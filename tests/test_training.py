"""Runs: repeatable, resumable bit for bit, and leaving what others read."""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from runs import OBJECTIVES, ROOT, smoke
from torch import Generator, nn

from splus.averaging import averaging_weight
from train import checkpoint
from train.config import config_hash
from train.loop import run
from train.objectives import SAMPLING_STEPS, Objective
from train.optimizers import build_optimizer
from train.parallel import Ranks
from train.schedules import constant, linear_decay
from train.trainer import Averages, Trainer, generator

STEPS, LAST_CHECKPOINT, KILLED_IN = 12, 4, 7


def lines(directory: Path, kind: str) -> list[dict]:
    """The metrics of a kind, without the clock."""
    metrics = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "seconds"} for line in metrics if line["kind"] == kind]


def seconds(directory: Path, weights: str) -> list[float]:
    metrics = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["seconds"] for line in metrics if line.get("weights") == weights]


def assert_same_run(first: Path, second: Path) -> None:
    """Same hash of the final weights, and the same lines but for the clock."""
    results = [json.loads((directory / "result.json").read_text()) for directory in (first, second)]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
    for kind in ("train", "validation"):
        assert lines(first, kind) == lines(second, kind)


def python(*arguments: str, directory: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run([sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("optimizer", ["adam", "splus"])
def test_one_seed_gives_one_run_however_often_in_a_process(tmp_path, objective, optimizer):
    for i in range(3):
        torch.manual_seed(i)
        run(smoke(objective, optimizer), tmp_path / str(i), progress=False)
        assert_same_run(tmp_path / "0", tmp_path / str(i))


def test_another_seed_gives_another_run(tmp_path):
    first, second = (run(smoke("language_modelling", "adam", f"seed={i}"), tmp_path / str(i), False) for i in (0, 1))
    assert first["hash"] != second["hash"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_optimizers_start_from_the_same_weights_and_batches(tmp_path, objective):
    for optimizer in ("adam", "splus"):
        run(smoke(objective, optimizer), tmp_path / optimizer, progress=False)
    assert lines(tmp_path / "adam", "validation")[0] == lines(tmp_path / "splus", "validation")[0]
    assert lines(tmp_path / "adam", "train")[0]["loss"] == lines(tmp_path / "splus", "train")[0]["loss"]


@pytest.mark.parametrize(("objective", "optimizer"), [("language_modelling", "adam"), ("diffusion", "splus")])
def test_killed_run_continues_bit_for_bit(tmp_path, objective, optimizer):
    config = smoke(objective, optimizer)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    OmegaConf.save(config, tmp_path / "config.yaml")
    script = f"""
import os, pathlib, signal, torch
from omegaconf import OmegaConf
from train import checkpoint
from train.config import config_hash
from train.loop import run
from train.trainer import Trainer

class Killed(Trainer):
    def backward(self, batch):
        loss = super().backward(batch)
        if self.step == {KILLED_IN}:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

import train.loop
train.loop.Trainer = Killed
run(OmegaConf.load({str(tmp_path / "config.yaml")!r}), pathlib.Path({str(killed)!r}), progress=False)
"""
    assert python("-c", script).returncode == -signal.SIGKILL
    assert len(lines(killed, "train")) == KILLED_IN
    assert checkpoint.newest(killed) == killed / f"checkpoint-{LAST_CHECKPOINT}"
    run(config, whole, progress=False)
    run(config, killed, progress=False)
    assert_same_run(killed, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_that_continues_bit_for_bit(tmp_path, monkeypatch, capsys, number):
    config = smoke("image_classification", "splus")

    def interrupted(self: Trainer, batch: tuple) -> float:
        if self.step == KILLED_IN - 1:
            os.kill(os.getpid(), number)
        return backward(self, batch)

    backward = Trainer.backward
    if signal.getsignal(number) == signal.SIG_IGN:  # as whoever starts the tests in the background may have it
        signal.signal(number, signal.SIG_DFL)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "backward", interrupted)
        with pytest.raises(SystemExit) as stopped:
            run(config, tmp_path / "stopped", progress=False)
    assert stopped.value.code == 128 + number
    assert f"Stopped at step {KILLED_IN}; the same command continues from" in capsys.readouterr().err
    assert checkpoint.newest(tmp_path / "stopped") == tmp_path / "stopped" / f"checkpoint-{KILLED_IN}"
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    run(config, tmp_path / "stopped", progress=False)
    run(config, tmp_path / "whole", progress=False)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_half_a_line_and_a_half_written_checkpoint_do_no_harm(tmp_path, monkeypatch):
    config = smoke()
    with monkeypatch.context() as patch:
        patch.setattr("train.loop.evaluate", raise_after_checkpoint)
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "cut", progress=False)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "tra')
    (tmp_path / "cut" / "checkpoint-8.new").mkdir()
    (tmp_path / "cut" / "checkpoint-8.new" / "__0_0.distcp").write_bytes(b"half")
    run(config, tmp_path / "cut", progress=False)
    run(config, tmp_path / "whole", progress=False)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("call", "times", "left"), [("os.fsync", 1, 1), ("os.rename", 2, 1), ("train.checkpoint.shutil.rmtree", 1, 2)]
)
def test_a_process_that_dies_while_it_saves_leaves_the_checkpoint_before(tmp_path, number, call, times, left):
    """Or the new one, if that has its name already: there is a whole one at all times."""
    checkpoint.save({"step": 1, "weights": torch.zeros(1000)}, tmp_path, 1, Ranks())
    script = f"""
import os, pathlib, torch, train.checkpoint
from train.parallel import Ranks

def dies(*arguments, call={call}, calls=[]):
    calls.append(call(*arguments) if len(calls) + 1 < {times} else os.kill(os.getpid(), {int(number)}))

{call} = dies
train.checkpoint.save({{"step": 2, "weights": torch.ones(1000)}}, pathlib.Path({str(tmp_path)!r}), 2, Ranks())
"""
    assert python("-c", script).returncode == -number
    assert (tmp_path / "checkpoint-1").exists()
    assert (tmp_path / "checkpoint-2.new").exists() == (left == 1)
    path = checkpoint.newest(tmp_path)
    assert path is not None
    assert checkpoint.load({"step": 0, "weights": torch.zeros(1000)}, path)["step"] == left


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99, None])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_half_a_checkpoint_is_refused_by_name(tmp_path, name, kept):
    checkpoint.save({"step": 1, "weights": torch.zeros(1000)}, tmp_path, 1, Ranks())
    file = tmp_path / "checkpoint-1" / name
    whole = file.read_bytes()
    if kept is None:
        file.unlink()
    else:
        file.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(ValueError, match=r"checkpoint-1 is no whole checkpoint .*; delete it to start this run anew"):
        checkpoint.load({"step": 0, "weights": torch.zeros(1000)}, tmp_path / "checkpoint-1")


def test_a_checkpoint_with_values_that_have_no_place_is_refused(tmp_path):
    """Such as the state of an optimizer that makes it in a later step than the first."""
    checkpoint.save({"step": 1, "late": {"sum": torch.zeros(3), "of": 2}}, tmp_path, 1, Ranks())
    with pytest.raises(ValueError, match=r"checkpoint-1 has late.of and 1 more values that this run.*has no place for"):
        checkpoint.load({"step": 0}, tmp_path / "checkpoint-1")


def raise_after_checkpoint(trainer: Trainer, record) -> None:
    if trainer.step > LAST_CHECKPOINT:
        raise KeyboardInterrupt
    for weights, clock, measures in trainer.evaluate():
        record.validation(trainer.step, clock, weights, measures)


def test_run_that_has_ended_is_returned_and_not_run_again(tmp_path, monkeypatch):
    config = smoke()
    result = run(config, tmp_path, progress=False)
    monkeypatch.setattr("train.loop.Trainer", None)
    assert run(config, tmp_path, progress=False) == result


def test_directory_of_another_configuration_is_refused_by_what_differs(tmp_path):
    run(smoke(), tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"holds a run of another configuration \(differing in: optimizer, seed\)"):
        run(smoke("language_modelling", "adam", "seed=1", "optimizer.lr=1"), tmp_path, progress=False)
    run(smoke("language_modelling", "adam", "wandb.project=other"), tmp_path, progress=False)


@pytest.mark.parametrize("optimizer", ["adam", "splus"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_run_leaves_its_metrics_and_result(tmp_path, objective, optimizer):
    result = run(smoke(objective, optimizer), tmp_path, progress=False)
    own = {"adam": [], "splus": ["averaged"]}[optimizer]
    weights = ["live", *own, "ema_0.5", "ema_0.9"]
    evaluated = [(line["step"], line["weights"]) for line in lines(tmp_path, "validation")]
    assert evaluated == [(step, name) for step in (0, 4, 8, 12) for name in weights]
    assert [line["step"] for line in lines(tmp_path, "train")] == list(range(1, STEPS + 1))
    assert list(result["final"]) == weights
    measure = {"language_modelling": "bits_per_byte", "image_classification": "accuracy", "diffusion": "loss"}[
        objective
    ]
    assert all(measure in measures for measures in result["final"].values())
    assert (result["status"], result["step"], result["steps"]) == ("finished", STEPS, STEPS)
    assert re.fullmatch("[0-9a-f]{64}", result["hash"])
    files = {"config.yaml", "metrics.jsonl", "result.json"} | ({"samples.png"} if objective == "diffusion" else set())
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_lowers_the_held_out_loss(tmp_path, objective):
    result = run(smoke(objective, "adam", "steps=40", "evaluate_every=40"), tmp_path, progress=False)
    assert result["final"]["live"]["loss"] < 0.97 * lines(tmp_path, "validation")[0]["loss"]


def test_divergence_is_a_result(tmp_path):
    result = run(smoke("image_classification", "adam", "optimizer.lr=1e6"), tmp_path, progress=False)
    assert (result["status"], result["final"]) == ("diverged", {})
    assert result["step"] < STEPS


def test_numbers_that_json_lacks_become_null(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "backward", lambda self, batch: float("nan"))
    result = run(smoke(), tmp_path, progress=False)
    assert (result["status"], result["step"]) == ("diverged", 1)
    assert lines(tmp_path, "train")[0]["loss"] is None


def test_keep_checkpoint_leaves_the_final_state(tmp_path):
    config = smoke("language_modelling", "splus", "keep_checkpoint=true")
    result = run(config, tmp_path, progress=False)
    trainer = Trainer(config)
    assert trainer.resume(tmp_path)
    assert (trainer.step, trainer.hash()) == (STEPS, result["hash"])


def test_training_starts_from_the_weights_of_another_run_and_nothing_else_of_it(tmp_path):
    first = run(smoke("language_modelling", "adam", "seed=7", "keep_checkpoint=true"), tmp_path / "first", False)
    here = f"start.directory={tmp_path / 'first'}"
    trainer = Trainer(smoke("language_modelling", "splus", here))
    assert trainer.hash() == first["hash"]
    assert trainer.step == 0
    assert {state["step"] for state in trainer.optimizer.state.values()} == {0}
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "first", moved)
    keys = {config_hash(smoke("language_modelling", "splus", *at)) for at in ([here], [f"start.directory={moved}"])}
    assert len(keys) == 1
    assert keys != {config_hash(smoke("language_modelling", "splus"))}


def test_a_start_that_is_none_is_refused(tmp_path):
    run(smoke("language_modelling", "adam", "keep_checkpoint=true"), tmp_path / "kept", False)
    run(smoke(), tmp_path / "ended", False)
    for settings, message in (
        (["start.directory=" + str(tmp_path / "gone")], "which holds no run; give the directory of one"),
        (["start.directory=" + str(tmp_path / "ended")], "holds no checkpoint; train it with keep_checkpoint=true"),
        (["start.directory=" + str(tmp_path / "kept"), "start.key=other"], "start.key=other given, but .* holds run"),
        (["start.directory=" + str(tmp_path / "kept"), "model.width=64"], "start from a run of the same model"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(smoke("language_modelling", "splus", *settings))


def test_the_state_of_the_optimizer_is_weighed(tmp_path):
    """Adam's is two numbers for each of the model's and a count of the steps for each parameter."""
    config = smoke("language_modelling", "adam")
    trainer = Trainer(config)
    trainer.train_step()
    count = len(list(trainer.model.parameters()))
    assert trainer.state_bytes() == 4 * (2 * trainer.parameters() + count)


def test_evaluation_is_off_the_clock_and_one_average_is_on_that_of_ema(tmp_path, monkeypatch):
    def slow(self: Objective, model: nn.Module, ranks: Ranks) -> dict[str, float]:
        time.sleep(0.2)
        return {"loss": 1.0}

    def slower_update(self: Averages, step: int) -> None:
        with self.clock:
            time.sleep(0.04)

    monkeypatch.setattr(Objective, "evaluate", slow)
    monkeypatch.setattr(Averages, "update", slower_update)
    result = run(smoke(), tmp_path, progress=False)
    assert result["seconds"] < 2.0  # 12 evaluations have slept for 2.4
    live, averaged = seconds(tmp_path, "live"), seconds(tmp_path, "ema_0.9")
    assert live == sorted(live)
    assert live[0] == 0
    cost = averaged[-1] - live[-1]
    assert cost == pytest.approx(STEPS * 0.04 / 2, rel=0.5)  # two averages were kept


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_harness_averages_are_bias_corrected_exponential_averages(decay):
    model = nn.Linear(3, 2).double()
    averages = Averages(model, [decay], torch.device("cpu"))
    accumulated = torch.zeros_like(model.weight)
    for step in range(1, 8):
        nn.init.normal_(model.weight, generator=Generator().manual_seed(step))
        averages.update(step)
        accumulated = decay * accumulated + (1 - decay) * model.weight.detach()
        torch.testing.assert_close(averages.of[decay]["weight"], accumulated / (1 - decay**step))
    assert averaging_weight(decay, 1) == pytest.approx(1)


def test_micro_batches_have_the_gradient_of_the_whole():
    gradients = []
    for size in ("null", "6"):  # 16 = 6 + 6 + 4
        trainer = Trainer(smoke("image_classification", "adam", f"micro_batch={size}"))
        loss = trainer.backward(trainer.objective.batch(16, Generator().manual_seed(0)))
        gradients.append([torch.tensor(loss), *(parameter.grad for parameter in trainer.model.parameters())])
    torch.testing.assert_close(*gradients)


def test_evaluation_is_the_mean_over_the_held_out_set(monkeypatch):
    trainer = Trainer(smoke("image_classification"))
    whole = trainer.measures()
    monkeypatch.setattr("train.objectives.EVALUATION_BATCH", 5)  # 32 = 6 · 5 + 2
    assert trainer.measures() == pytest.approx(whole)


def test_flow_matching_sampler_follows_an_exact_velocity():
    """With the velocity of straight lines to one image, Euler steps end at that image."""
    objective = Trainer(smoke("diffusion")).objective
    target = torch.rand(1, 1, 28, 28, generator=Generator().manual_seed(1))

    class Exact(nn.Module):
        def forward(self, x, times, labels):
            return (target - x) / (1 - times[:, None, None, None])

    (samples,) = objective.samples(Exact(), torch.arange(3))
    torch.testing.assert_close(samples, target.expand(3, -1, -1, -1), atol=1e-5, rtol=0)


def test_guidance_goes_from_no_label_beyond_the_label(monkeypatch):
    """With constant velocities c of label 3 and n of none, Euler steps end at noise + n + w (c - n), in every batch."""
    monkeypatch.setattr("train.objectives.SAMPLING_BATCH", 2)
    objective = Trainer(smoke("diffusion")).objective
    calls = []

    class Constant(nn.Module):
        def forward(self, x, times, labels):
            calls.append(set(labels.tolist()))
            return torch.where(labels == 3, 0.0, -0.25)[:, None, None, None].expand_as(x)

    def ends(guidance):
        return torch.cat(list(objective.samples(Constant(), torch.full((3,), 3), guidance)))

    conditional = ends(1.0)
    assert calls == [{3}] * (2 * SAMPLING_STEPS)  # nothing is spent on samples without a label
    for guidance in (0.0, 2.0):
        expected = (conditional + 0.25 * (guidance - 1)).clamp(-1, 1)
        inside = (conditional.abs() < 1) & (expected.abs() < 1)
        torch.testing.assert_close(ends(guidance)[inside], expected[inside], atol=1e-5, rtol=0)
    assert not conditional[0].equal(conditional[2])  # a batch has noise of its own


def test_schedules_warm_up_then_stay_or_fall_to_zero():
    assert [constant(4)(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [linear_decay(2, 6)(step) for step in range(7)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    with pytest.raises(ValueError, match="warmup=4 leaves nothing of steps=4"):
        linear_decay(4, 4)


def test_learning_rates_in_the_metrics_are_those_of_the_schedule(tmp_path):
    run(smoke("language_modelling", "adam", "schedule=linear_decay", "optimizer.lr=1"), tmp_path, progress=False)
    rates = [line["lr"] for line in lines(tmp_path, "train")]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@pytest.mark.parametrize("optimizer", ["adam", "splus", "muon"])
def test_optimizers_decay_the_same_parameters(optimizer):
    trainer = Trainer(smoke("diffusion", optimizer))
    decayed, *rest = build_optimizer(trainer.config.optimizer, trainer.model).param_groups
    assert decayed["weight_decay"] == 0.1
    assert {group["weight_decay"] for group in rest} == {0}
    names = {name for group in rest for name in group["param_names"]}
    assert {"head.weight", "position", "label_embedding.weight"} <= names
    assert "patch_embedding.weight" in decayed["param_names"]
    assert all(isinstance(group["betas"], tuple) for group in rest)


def test_options_of_a_group_by_its_name():
    """They reach that group alone; one that the model does not have is an error that lists those it has."""
    trainer = Trainer(smoke("language_modelling", "splus", "+optimizer.groups.head.width_power=7"))
    scales = {group["name"]: group["width_power"] for group in trainer.optimizer.param_groups}
    assert scales["head"] == 7
    assert 7 not in [scale for name, scale in scales.items() if name != "head"]
    with pytest.raises(ValueError, match=r"optimizer.groups.heads is given; .* whitened, embeddings, head"):
        Trainer(smoke("language_modelling", "splus", "+optimizer.groups.heads.width_power=7"))


def test_muon_with_adam_is_torchs_own_two(tmp_path):
    """Steps are those of torch.optim.Muon on the matrices and of AdamW on the rest, also after saving and loading."""
    trainer, apart = (Trainer(smoke("language_modelling", "muon")) for _ in range(2))
    config = trainer.config.optimizer
    trainer.optimizer = build_optimizer(config, trainer.model)  # without the trainer's schedule
    groups = {group["name"]: group["params"] for group in apart.optimizer.param_groups}
    rest = [parameter for name, parameters in groups.items() if name != "whitened" for parameter in parameters]
    both = [
        torch.optim.Muon(groups["whitened"], lr=config.lr, weight_decay=config.weight_decay),
        torch.optim.AdamW(
            rest, lr=config.lr * config.adam_lr, betas=tuple(config.adam_betas), weight_decay=0.0, fused=True
        ),
    ]
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(trainer.optimizer.state_dict())
            trainer.optimizer = build_optimizer(config, trainer.model)
            trainer.optimizer.load_state_dict(state)
        gradients = [
            torch.randn(p.shape, generator=generator(step, i)) for i, p in enumerate(trainer.model.parameters())
        ]
        for model in (trainer.model, apart.model):
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.grad = gradient.clone()
        trainer.optimizer.step()
        for optimizer in both:
            optimizer.step()
    for mine, theirs in zip(trainer.model.parameters(), apart.model.parameters()):
        assert torch.equal(mine, theirs)


def test_runs_outside_the_main_thread_too(tmp_path):
    thread = threading.Thread(target=run, args=(smoke(), tmp_path, False))
    thread.start()
    thread.join()
    assert (tmp_path / "result.json").exists()


def test_command_prints_the_final_measures_and_writes_its_directory_alone(tmp_path):
    command = ("-m", "train", "preset=smoke", "optimizer=splus", "wandb.mode=offline")
    done = python(*command, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    (directory,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch("language_modelling-splus-[0-9a-f]{8}", directory.name)
    assert re.search(r"averaged +loss \d\.\d+ +bits_per_byte", done.stdout)
    assert f"runs/{directory.name}" in done.stdout
    assert "step/s" in done.stderr
    assert list((directory / "wandb").glob("offline-run-*"))
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_one_command_trains_several_configurations_and_keeps_the_error_of_one(tmp_path):
    """Each in its own directory; the one that fails has its traceback there and fails the command, after the rest."""
    several = ("optimizer=adam", "optimizer.lr=0.01,-1,0.02", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    done = python("-m", "train", "-m", "preset=smoke", "steps=4", *several, directory=tmp_path)
    assert done.returncode == 1, done.stdout
    directories = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert all(re.fullmatch("language_modelling-adam-[0-9a-f]{8}", path.name) for path in directories)
    (failed,) = (path for path in directories if not (path / "result.json").exists())
    assert len(directories) == 3
    assert "ValueError: Invalid learning rate: -1" in (failed / "error.txt").read_text()
    assert [path for path in directories if (path / "error.txt").exists()] == [failed]
