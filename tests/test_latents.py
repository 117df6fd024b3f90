"""Latents of images: read from files as they are, drawn and trained on as images are."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from runs import smoke
from stand_ins import LABELS, seeded, write_classes, write_latents
from torch import Tensor

from train.data.encode import encode
from train.data.image_folder import ImageFolder
from train.data.latents import Latents
from train.loop import run
from train.trainer import Trainer


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_latents_are_read_as_they_are_but_for_the_factor(tmp_path, suffix):
    data = Latents(write_latents(tmp_path, suffix), scale=0.5)
    assert data.sizes == {"image_size": 8, "channels": 4, "classes": 3}
    latents, labels = data.batch(100, seeded())
    assert latents.dtype == torch.float32
    assert latents.shape == (100, 4, 8, 8)
    numbers = (latents[:, 0, 0, 0] / 0.5).long()
    assert (latents == 0.5 * numbers[:, None, None, None]).all()
    assert set(numbers.tolist()) == set(range(6))
    assert labels.tolist() == [LABELS[i] for i in numbers]
    torch.testing.assert_close(data.batch(100, seeded()), (latents, labels), rtol=0, atol=0)
    held_out, labels = data.validation(3)
    assert held_out[:, 0, 0, 0].tolist() == [0, 1, 2.5]
    assert labels.tolist() == [0, 1, 1]


def test_latents_are_mapped_into_memory(tmp_path):
    """Those of a sparse file of 512 GB."""
    large = torch.zeros(6, 4, 256, 256, dtype=torch.half)
    place = write_latents(tmp_path, train_labels=torch.arange(2**20) % 3, val_latents=large)
    np.lib.format.open_memmap(tmp_path / "train_latents.npy", "w+", np.float16, (2**20, 4, 256, 256))
    assert Latents(place).batch(4, seeded())[0].eq(0).all()


def diffusion(place: str, examples: int) -> DictConfig:
    settings = ("data=latents", f"data.directory={place}", "model.patch=2", f"validation_examples={examples}")
    return smoke("diffusion", "adam", *settings)


def test_diffusion_trains_on_latents_and_shows_no_picture(tmp_path):
    result = run(diffusion(write_latents(tmp_path / "latents"), 6), tmp_path / "run", progress=False)
    assert result["status"] == "finished"
    assert not (tmp_path / "run" / "samples.png").exists()


def test_pictures_show_the_first_ten_of_many_labels(tmp_path):
    """A row of eight for each, at twice their size."""
    content = {"latents": torch.zeros(12, 3, 8, 8), "labels": torch.arange(12)}
    place = write_latents(
        tmp_path, **{f"{part}_{what}": content[what] for part in ("train", "val") for what in content}
    )
    assert Trainer(diffusion(place, 12)).picture().shape == (10 * 16, 8 * 16, 3)


def test_folders_of_images_are_encoded_in_their_order(tmp_path):
    images = ImageFolder(write_classes(tmp_path / "images"), size=8)
    seen = []

    def halved(pixels: Tensor) -> Tensor:
        seen.append(len(pixels))
        return torch.nn.functional.avg_pool2d(pixels, 2)

    encode(images, halved, tmp_path / "latents", batch=3)
    assert seen == [3, 2, 3, 3, 2]
    data = Latents(str(tmp_path / "latents"))
    assert data.sizes == {"image_size": 4, "channels": 3, "classes": 2}
    torch.testing.assert_close(data.validation(8)[0], halved(images.validation(8)[0]), rtol=1e-3, atol=1e-3)
    assert torch.equal(data.held_out_labels, images.held_out_labels)
    assert torch.equal(data.labels, images.labels)
    assert not list((tmp_path / "latents").glob("*.new"))


def test_latents_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"needs data.directory=DIR. Encode a folder of images"):
        Latents(None)
    with pytest.raises(
        FileNotFoundError, match=r"train_latents\[.npy\|.pt\] is missing.*`.*train.data.encode IMAGES .*`"
    ):
        Latents(str(tmp_path))
    for name, wrong, told in (
        ("train_latents", torch.zeros(6, 4, 8), r"train_latents is torch.float32 of shape \(6, 4, 8\); floats"),
        (
            "val_labels",
            torch.zeros(5).long(),
            r"val_labels is torch.int64 of shape \(5,\); integers from 0 of shape \(6,\)",
        ),
        ("train_labels", torch.full((6,), -1), "train_labels is .* integers from 0"),
        ("val_latents", torch.zeros(6, 4, 4, 4), r"to train on are \(4, 8, 8\) but those of val \(4, 4, 4\)"),
        ("val_labels", torch.full((6,), 3), "val has a label of 3"),
    ):
        with pytest.raises(ValueError, match=told):
            Latents(write_latents(tmp_path, **{name: wrong}))
    path = Path(write_latents(tmp_path)) / "train_latents.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{path} is not a whole array"):
        Latents(str(tmp_path))
    path.unlink()
    torch.save({"latents": torch.zeros(6, 4, 8, 8)}, path.with_suffix(".pt"))
    with pytest.raises(ValueError, match=r"train_latents.pt holds a dict; one array is required"):
        Latents(str(tmp_path))
