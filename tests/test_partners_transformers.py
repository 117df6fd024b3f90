"""The Trainer of transformers with the callback: trained as by a plain loop, evaluated and saved with the averages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from partners import bits, same
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from splus import SPlus, param_groups
from splus.integrations.transformers import AveragedWeights

STEPS, BATCH = 10, 4
TOKENS = torch.randint(16, (STEPS * BATCH, 8), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]

pytestmark = pytest.mark.filterwarnings("ignore")


def network() -> GPT2LMHeadModel:
    """A GPT-2 of one layer with its head tied to the embedding."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    )


def optimizer_of(model: nn.Module) -> SPlus:
    return SPlus(param_groups(model), lr=0.3, ema_decay=0.8)


class Stop(TrainerCallback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def train(directory: Path, resume: Path | None = None, last: int = STEPS, **options: Any) -> Trainer:
    """Two epochs of five steps in the given order, at a constant rate, or fewer steps."""
    settings = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 2,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "save_steps": 4,
        "eval_steps": 4,
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }
    model = network()
    optimizer = optimizer_of(model)
    trainer = Trainer(
        model,
        TrainingArguments(str(directory), **settings),
        train_dataset=ROWS[: STEPS // 2 * BATCH],
        eval_dataset=ROWS,
        optimizers=(optimizer, None),
        callbacks=[Stop(last), AveragedWeights()],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def loss_of(model: GPT2LMHeadModel, rows: Tensor, tokens: int) -> Tensor:
    """As the Trainer has it: the sum over the predicted tokens over the number of all."""
    return model(input_ids=rows, labels=rows, num_items_in_batch=torch.tensor(tokens)).loss


class Moment(NamedTuple):
    """A plain loop after a step: the two sets of weights."""

    weights: dict[str, Tensor]
    averages: dict[str, Tensor]


def plain_loop(dtype: torch.dtype | None = None, parts: int = 1) -> list[Moment]:
    """The moments after 0, 1, 2, … steps, with the switch made by hand."""
    model = network()
    optimizer = optimizer_of(model)
    moments = []
    for step in range(STEPS + 1):
        weights = bits(model)
        with optimizer.averaged():
            moments.append(Moment(weights, bits(model)))
        rows = TOKENS[: STEPS // 2 * BATCH].view(STEPS // 2, BATCH, -1)[step % (STEPS // 2)]
        for part in rows.chunk(parts):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of(model, part, rows.numel())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return moments


def evaluation_loss(averages: Mapping[str, Tensor]) -> float:
    """Of all rows, in the Trainer's batches of eight."""
    model = network().eval()
    model.load_state_dict(averages, strict=False)
    with torch.no_grad():
        losses = [loss_of(model, rows, rows.numel()) for rows in TOKENS.split(8)]
    return torch.stack(losses).repeat_interleave(8).numpy().mean().item()


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    trainer.optimizer.train()
    return bits(trainer.model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_training_is_the_plain_loop_and_evaluates_its_averages(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Weights and evaluation losses are those of a loop that switches by hand; the averages are left in the model."""
    moments = plain_loop(dtype)
    trainer = train(tmp_path, eval_strategy="steps", save_strategy="no", bf16=dtype is not None)
    assert same(bits(trainer.model), moments[-1].averages)
    if dtype is None:
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert losses == [evaluation_loss(moments[step].averages) for step in (4, 8, STEPS)]
    assert same(weights_of(trainer), moments[-1].weights)


def test_accumulated_gradients(tmp_path: Path) -> None:
    """Two batches of two for each step are those of the loop that adds up their gradients; the averages are left."""
    trainer = train(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="no")
    last = plain_loop(parts=2)[-1]
    assert same(bits(trainer.model), last.averages)
    assert same(weights_of(trainer), last.weights)


SAVED = {
    "without evaluation": {"save_strategy": "steps"},
    "after epochs": {"save_strategy": "epoch"},
    "after evaluation": {"save_strategy": "steps", "eval_strategy": "steps"},
    "the best": {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "loss"},
}


@pytest.mark.parametrize("when", SAVED)
def test_checkpoints_hold_the_averages_and_continue_from_the_weights(when: str, tmp_path: Path) -> None:
    """Whenever the Trainer writes one, its model is the averaged one, and a resumed run is the uninterrupted one."""
    moments = plain_loop()
    train(tmp_path / "run", **SAVED[when])
    folders = sorted((tmp_path / "run").glob("checkpoint-*"))
    assert folders
    for folder in folders:
        step = int(folder.name.removeprefix("checkpoint-"))
        assert same(load_file(folder / "model.safetensors"), moments[step].averages)
        if step < STEPS:
            resumed = train(tmp_path / "resumed", folder, **SAVED[when])
            assert same(bits(resumed.model), moments[-1].averages)
            assert same(weights_of(resumed), moments[-1].weights)


@pytest.mark.parametrize(("last", "evaluated"), [(STEPS, (4, 8, STEPS)), (6, (4,))])
def test_best_model_stays_in_place_after_training(last: int, evaluated: tuple[int, ...], tmp_path: Path) -> None:
    """Evaluating and saving after load_best_model_at_end uses the best checkpoint and not the last averages."""
    moments = plain_loop()
    options = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    trainer = train(tmp_path, last=last, metric_for_best_model="loss", **options)
    losses = {step: evaluation_loss(moments[step].averages) for step in evaluated}
    best = min(losses, key=losses.__getitem__)
    assert trainer.state.best_global_step == best != last
    assert same(bits(trainer.model), moments[best].averages)
    assert trainer.evaluate()["eval_loss"] == losses[best]
    trainer.save_model(str(tmp_path / "final"))
    assert same(load_file(tmp_path / "final" / "model.safetensors"), moments[best].averages)


def test_optimizer_that_the_trainer_makes(tmp_path: Path) -> None:
    """Given by its class, SPlus trains on the Trainer's two groups, with their decay."""
    settings = TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    model = network()
    before = bits(model)
    made = (SPlus, {"lr": 0.1, "weight_decay": 0.3})
    trainer = Trainer(model, settings, train_dataset=ROWS, optimizer_cls_and_kwargs=made, callbacks=[AveragedWeights()])
    trainer.train()
    assert not same(bits(model), before)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.0, 0.0]


def test_callback_without_the_optimizer_is_refused(tmp_path: Path) -> None:
    """A callback that would do nothing says so."""
    settings = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(network(), settings, train_dataset=ROWS, callbacks=[AveragedWeights()])
    with pytest.raises(ValueError, match="found the optimizer AdamW and no SPlus"):
        trainer.train()
