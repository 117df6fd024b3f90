"""The paper's preset on small data in the layouts of the paper's: all of it but the model's and the batch's size."""

import math

import pytest
import torch
from runs import configuration
from stand_ins import SQUARES, write_classes, write_documents, write_gpt2, write_latents

from train.trainer import Trainer

NARROW = ("model.width=64", "model.depth=1", "batch_size=128", "validation_examples=4")


def trained(objective: str, *settings: str) -> tuple[Trainer, list[float]]:
    """Two steps, each of two micro-batches, and their losses."""
    config = configuration("preset=paper", f"objective={objective}", *settings, *NARROW)
    assert config.micro_batch == 64
    trainer = Trainer(config)
    return trainer, [trainer.train_step()[0] for _ in range(2)]


def test_language_models_train_on_documents_in_gpt2_s_tokens(tmp_path):
    place = write_documents(tmp_path / "documents", *[SQUARES.decode()] * 3)
    gpt2 = write_gpt2(tmp_path / "gpt2")
    trainer, losses = trained(
        "language_modelling",
        "data=hugging_face",
        "data.name=Skylion007/openwebtext",
        f"data.directory={place}",
        "tokenizer=pretrained",
        f"data.tokenizer.directory={gpt2}",
    )
    assert trainer.objective.held_out[0].shape == (4, 257)
    assert losses[0] == pytest.approx(math.log(300), rel=0.05)
    assert math.isfinite(losses[1])


def test_classifiers_train_on_folders_in_patches_of_sixteen(tmp_path):
    trainer, losses = trained("image_classification", "data=image_folder", f"data.directory={write_classes(tmp_path)}")
    assert trainer.model.position.shape == (256 + 1, 64)
    assert losses[0] == pytest.approx(math.log(2), rel=0.3)
    assert math.isfinite(losses[1])


def test_diffusion_trains_on_latents_in_patches_of_two(tmp_path):
    """As many tokens as the paper's; without a signal the first loss is the noise's variance."""
    zeros = torch.zeros(6, 4, 32, 32)
    place = write_latents(tmp_path, train_latents=zeros, val_latents=zeros)
    trainer, losses = trained("diffusion", "data=latents", f"data.directory={place}")
    assert trainer.model.position.shape == (256, 64)
    assert losses[0] == pytest.approx(1, rel=0.01)
    assert math.isfinite(losses[1])
