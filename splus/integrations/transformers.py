"""A callback for the Trainer of transformers: no checkpoint and no end of training without the averaged weights."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from splus.optimizer import SPlus


class AveragedWeights(TrainerCallback):
    """Has the averaged weights in the model whenever it is saved, and after training.

    The Trainer switches by itself for evaluation and for training steps, but neither before a checkpoint without an
    evaluation nor at the end, where an evaluation would put the last averages over the best model it has loaded.

    Give it last, after callbacks that ask for checkpoints of their own.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        own = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper switches nothing that has no eval()
        if not isinstance(own, SPlus):
            raise ValueError(
                f"AveragedWeights found the optimizer {type(own).__name__} and no SPlus; give the Trainer one in "
                "optimizers=(optimizer, scheduler), or leave the callback out."
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        if control.should_save:
            optimizer.eval()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        optimizer.eval()
