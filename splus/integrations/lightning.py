"""A callback for Lightning: no validation and no checkpoint without the averaged weights."""

from contextlib import ExitStack
from functools import partial
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

from splus.optimizer import SPlus


class AveragedWeights(Callback):
    """Has the averaged weights in the model during ``fit`` whenever no training batch is at work.

    The weights being trained are in it from the first batch of an epoch, or after a validation, to the next validation
    or the end of the epoch. A checkpoint, whenever it is written, holds the averaged weights as its model, and what
    ``fit(ckpt_path=...)`` needs to go on as if uninterrupted. After ``fit``, interrupted or not, the averaged weights
    stay in the model.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Not on_save_checkpoint: it is not called for checkpoints of the weights only.
        if getattr(trainer.save_checkpoint, "func", None) is not _save_averaged:
            setattr(trainer, "save_checkpoint", partial(_save_averaged, trainer, trainer.save_checkpoint))  # noqa: B010

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if not _optimizers(trainer):
            given = [type(optimizer).__name__ for optimizer in trainer.optimizers]
            raise ValueError(
                f"AveragedWeights found no SPlus among the optimizers {given}; "
                "return one from configure_optimizers, or leave the callback out."
            )

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        _switch(trainer, True)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        _switch(trainer, False)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        _switch(trainer, False)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        _switch(trainer, False)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        _switch(trainer, False)


def _optimizers(trainer: Trainer) -> list[SPlus]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SPlus)]


def _switch(trainer: Trainer, mode: bool) -> None:
    for optimizer in _optimizers(trainer):
        optimizer.train(mode)


def _save_averaged(trainer: Trainer, save: Any, *args: Any, **kwargs: Any) -> None:
    with ExitStack() as averaged:
        for optimizer in _optimizers(trainer):
            averaged.enter_context(optimizer.averaged())
        save(*args, **kwargs)
