"""Lightning's Trainer with the callback: it trains as a plain loop does, and validates and saves the averages."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from partners import bits, loss_of, network, optimizer_of, same
from torch import Tensor, nn
from torch.utils.data import DataLoader

import splus.integrations.lightning
from splus import SPlus
from splus.integrations.lightning import AveragedWeights

EPOCHS, BATCHES = 2, 6
INPUTS = torch.randn(EPOCHS, BATCHES, 4, 5, generator=torch.Generator().manual_seed(0))
LOADER = DataLoader(range(1))  # one batch, for validation

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(pl.LightningModule):
    """A regression that takes its data by the number of the batch, so that the loader has no state to resume."""

    def __init__(self, accumulate: int = 1, manual: bool = False) -> None:
        super().__init__()
        self.network, self.accumulate, self.automatic_optimization = network(), accumulate, not manual
        self.validated: list[tuple[int, float]] = []
        self.fails_after: int | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.network, INPUTS[self.current_epoch, batch_idx])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss / self.accumulate)
            if (batch_idx + 1) % self.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        if self.global_step == self.fails_after:
            raise KeyError("broken data")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = loss_of(self.network, INPUTS.flatten(0, 2))
        self.validated.append((self.trainer.global_step, loss.item()))
        self.log("loss", loss)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", loss_of(self.network, INPUTS.flatten(0, 2)))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(INPUTS.flatten(0, 2))

    def on_validation_model_zero_grad(self) -> None:
        """Gradients that are accumulated by hand outlive a validation."""

    def configure_optimizers(self) -> SPlus:
        return optimizer_of(self.network)


def fit(module: Module, tmp_path: Path, *callbacks: pl.Callback, resume: Path | None = None) -> pl.Trainer:
    """Two epochs with a sanity check and a validation every three of six batches."""
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        val_check_interval=3,
        num_sanity_val_steps=1,
        accumulate_grad_batches=module.accumulate if module.automatic_optimization else 1,
        gradient_clip_val=0.5 if module.automatic_optimization else None,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[AveragedWeights(), *callbacks],
    )
    trainer.fit(module, DataLoader(range(BATCHES)), LOADER, ckpt_path=resume)
    return trainer


class Moment(NamedTuple):
    """A plain loop after a step: the two sets of weights, and the loss of the averaged ones."""

    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    loss: float


def plain_loop(accumulate: int = 1, clip: bool = True) -> list[Moment]:
    """The moments after 0, 1, 2, … steps, with the switch made by hand."""
    model = network()
    optimizer = optimizer_of(model)
    moments = []

    def note() -> None:
        weights = bits(model)
        with optimizer.averaged():
            moments.append(Moment(weights, bits(model), loss_of(model, INPUTS.flatten(0, 2)).item()))

    note()
    for number, x in enumerate(INPUTS.flatten(0, 1), start=1):
        (loss_of(model, x) / accumulate).backward()
        if number % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            note()
    return moments


def averages_in(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name.removeprefix("network."): value for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fit_is_the_plain_loop_and_validates_its_averages(accumulate: int, manual: bool, tmp_path: Path) -> None:
    """Weights, and the loss of every validation, the sanity check's too, are those of a loop that switches by hand."""
    moments = plain_loop(accumulate, clip=not manual)
    module = Module(accumulate, manual)
    trainer = fit(module, tmp_path)
    expected = [0, *(batches // accumulate for batches in (3, 6, 9, 12))]
    assert module.validated == [(step, moments[step].loss) for step in expected]
    assert same(bits(module.network), moments[-1].averages)
    trainer.optimizers[0].train()
    assert same(bits(module.network), moments[-1].weights)


SAVED = {
    "every two steps": {"every_n_train_steps": 2},
    "weights only": {"every_n_train_steps": 2, "save_weights_only": True},
    "after validation": {"monitor": "loss"},
    "after epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


@pytest.mark.parametrize("when", SAVED)
def test_checkpoints_hold_the_averages_and_continue_from_the_weights(when: str, tmp_path: Path) -> None:
    """Whenever Lightning writes one, its model is the averaged one, and a run resumed from it is the uninterrupted."""
    moments = plain_loop()
    fit(Module(), tmp_path, ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **SAVED[when]))
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) >= 2
    for file in files:
        checkpoint = torch.load(file, weights_only=True)
        assert same(averages_in(checkpoint), moments[checkpoint["global_step"]].averages)
        if when != "weights only":
            module = Module()
            trainer = fit(module, tmp_path, resume=file)
            trainer.optimizers[0].train()
            assert same(bits(module.network), moments[-1].weights)
            assert module.validated[-1:] in ([(12, moments[-1].loss)], [])


def test_checkpoint_written_by_hand_between_batches(tmp_path: Path) -> None:
    """trainer.save_checkpoint in a hook of one's own saves the averages and leaves the raw weights in the model."""
    moments, seen = plain_loop(), []

    def save(trainer: pl.Trainer, module: Module, *_: Any) -> None:
        trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
        seen.append(same(bits(module.network), moments[trainer.global_step].weights))
        saved = averages_in(torch.load(tmp_path / "by_hand.ckpt", weights_only=True))
        seen.append(same(saved, moments[trainer.global_step].averages))

    fit(Module(), tmp_path, LambdaCallback(on_train_batch_end=save))
    assert seen == [True] * 24


def test_best_checkpoint_is_tested_and_predicted_with(tmp_path: Path) -> None:
    """test(), validate() and predict() see the averages after fit, and a checkpoint's when they are given one."""
    moments = plain_loop()
    module = Module()
    keep = ModelCheckpoint(tmp_path, filename="{step}", monitor="loss", mode="max")
    trainer = fit(module, tmp_path, keep)
    best = max(step for step in (3, 6, 9, 12) if moments[step].loss == max(moments[i].loss for i in (3, 6, 9, 12)))
    assert Path(keep.best_model_path).name == f"step={best}.ckpt"
    assert moments[best].loss != moments[-1].loss
    assert trainer.test(module, LOADER, verbose=False) == [{"test": moments[-1].loss}]
    assert trainer.test(module, LOADER, ckpt_path="best", verbose=False) == [{"test": moments[best].loss}]
    assert trainer.validate(module, LOADER, verbose=False) == [{"loss": moments[best].loss}]
    assert same(bits(module.network), moments[best].averages)
    (predicted,) = trainer.predict(module, LOADER)
    assert torch.equal(predicted, module.network(INPUTS.flatten(0, 2)))


def test_interrupted_fit_leaves_and_saves_the_averages(tmp_path: Path) -> None:
    """After an error in training too, a checkpoint that is tested is not overwritten, and the run can be resumed."""
    moments = plain_loop()
    module = Module()
    module.fails_after = 4
    keep = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    with pytest.raises(KeyError, match="broken data"):
        fit(module, tmp_path, keep, OnExceptionCheckpoint(tmp_path))
    assert same(bits(module.network), moments[4].averages)
    checkpoint = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert same(averages_in(checkpoint), moments[4].averages)
    resumed = Module()
    fit(resumed, tmp_path, resume=tmp_path / "on_exception.ckpt").optimizers[0].train()
    assert same(bits(resumed.network), moments[-1].weights)
    tested = module.trainer.test(module, LOADER, ckpt_path=tmp_path / "step=2.ckpt", verbose=False)
    assert tested == [{"test": moments[2].loss}]


def test_switching_through_the_optimizer_that_lightning_wraps(tmp_path: Path) -> None:
    """self.optimizers() of a module has averaged(), as the optimizer itself, and sampling with it leaves no trace."""
    moments, seen = plain_loop(), []

    def sample(trainer: pl.Trainer, module: Module, *_: Any) -> None:
        with module.optimizers().averaged():
            seen.append(same(bits(module.network), moments[trainer.global_step].averages))

    module = Module()
    fit(module, tmp_path, LambdaCallback(on_train_batch_end=sample)).optimizers[0].train()
    assert seen == [True] * 12
    assert same(bits(module.network), moments[-1].weights)


def test_callback_without_the_optimizer_is_refused(tmp_path: Path) -> None:
    """A callback that would do nothing says so."""
    module = Module()
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters())
    with pytest.raises(ValueError, match=r"no SPlus among the optimizers \['Adam'\]"):
        fit(module, tmp_path)


def test_package_that_is_named_pytorch_lightning_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only pytorch_lightning is installed, the callback is one of its callbacks."""
    import pytorch_lightning

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "lightning.pytorch", None)
        module = importlib.reload(splus.integrations.lightning)
        assert issubclass(module.AveragedWeights, pytorch_lightning.Callback)
    importlib.reload(splus.integrations.lightning)
