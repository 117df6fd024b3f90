"""What torchrun starts for the tests of trainers: each rank prints how far it is from one process."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from accelerate import Accelerator
from partners import bits, loss_of, network
from torch import Tensor, nn
from torch.utils.data import DataLoader

from splus import SPlus
from splus.integrations.lightning import AveragedWeights

INPUTS = torch.randn(2, 4, 8, 5, generator=torch.Generator().manual_seed(0))


def optimizer_of(model: nn.Module) -> SPlus:
    # One process to compare with, with the same code, before there is a group.
    group = dist.group.WORLD if dist.is_initialized() else None
    return SPlus(model.named_parameters(), lr=0.3, ema_decay=0.8, sides="shorter", process_group=group)


def alone() -> list[dict[str, Tensor]]:
    """The weights and their averages after the batches, with clipped gradients."""
    model = network()
    optimizer = optimizer_of(model)
    for x in INPUTS.flatten(0, 1):
        loss_of(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    weights = bits(model)
    with optimizer.averaged():
        return [weights, bits(model)]


def accelerate() -> list[dict[str, Tensor]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model))
    for x in INPUTS.flatten(0, 1):
        for part in x.chunk(accelerator.num_processes)[accelerator.process_index].chunk(2):
            with accelerator.accumulate(wrapped):
                accelerator.backward(loss_of(wrapped, part))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    weights = bits(model)
    optimizer.eval()
    return [weights, bits(model)]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = INPUTS[self.current_epoch, batch_idx]
        return loss_of(self.network, x.chunk(self.trainer.world_size)[self.global_rank])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = bits(self.network)

    def configure_optimizers(self) -> SPlus:
        return optimizer_of(self.network)


def lightning() -> list[dict[str, Tensor]]:
    module, quiet = Module(), dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer: Any = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        callbacks=[AveragedWeights()],
        **quiet,
    )
    trainer.fit(module, DataLoader(range(INPUTS.shape[1])), DataLoader(range(1)))
    averages = bits(module.network)
    assert all(torch.equal(module.seen[name], value) for name, value in averages.items())
    module.optimizers().optimizer.train()
    return [bits(module.network), averages]


if __name__ == "__main__":
    torch.set_num_threads(1)
    expected = alone()
    for one, here in zip(expected, {"accelerate": accelerate, "lightning": lightning}[sys.argv[1]]()):
        for name, value in one.items():
            torch.testing.assert_close(here[name], value, rtol=1e-3, atol=1e-4)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} as one")
    dist.destroy_process_group()
