"""Images as latents of an autoencoder, encoded beforehand: numbers that are mapped into memory, never read whole."""

import warnings
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from torch import Generator, Tensor

from train.data.images import check_examples

SUFFIXES = (".npy", ".pt")


class Latents:
    """Latents (N, C, Y, X) with labels (N,), as they are but for a factor.

    Args:
        directory: holds ``train_latents``, ``train_labels``, ``val_latents`` and ``val_labels``, each as ``.npy``, or
            ``.pt`` of one tensor: floats (N, C, Y, X) with Y = X, and integers (N,).
        scale: latents are multiplied by it, to a standard deviation of about 1, as that of the noise.
    """

    def __init__(self, directory: str | None, scale: float = 1.0) -> None:
        if directory is None:
            raise ValueError(f"data=latents needs data.directory=DIR. {how_to_get(Path('DIR'))}")
        self.scale = scale
        (self.latents, self.labels), (self.held_out, self.held_out_labels) = (
            read(Path(directory), part) for part in ("train", "val")
        )
        here, there = self.latents.shape[1:], self.held_out.shape[1:]
        if here != there:
            raise ValueError(f"{directory}: latents to train on are {tuple(here)} but those of val {tuple(there)}")
        self.classes = int(self.labels.max()) + 1
        if int(self.held_out_labels.max()) >= self.classes:
            raise ValueError(f"{directory}: val has a label of {int(self.held_out_labels.max())}, train has it not")

    @property
    def sizes(self) -> dict[str, int]:
        """What a model of this data must know."""
        return {"image_size": self.latents.shape[2], "channels": self.latents.shape[1], "classes": self.classes}

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Training latents (size, C, Y, X) and their labels (size,)."""
        chosen = torch.randint(len(self.latents), (size,), generator=generator)  # (B,)
        return self.latents[chosen].float() * self.scale, self.labels[chosen]

    def validation(self, examples: int) -> tuple[Tensor, Tensor]:
        """The same held-out latents (examples, C, Y, X) every time, evenly spaced, and their labels."""
        check_examples(examples, len(self.held_out))
        chosen = torch.arange(examples) * (len(self.held_out) - 1) // max(1, examples - 1)
        return self.held_out[chosen].float() * self.scale, self.held_out_labels[chosen]


def read(root: Path, part: str) -> tuple[Tensor, Tensor]:
    """Latents (N, C, Y, X), mapped into memory, and labels (N,) of a part."""
    latents, labels = read_array(root, f"{part}_latents"), read_array(root, f"{part}_labels")
    if latents.ndim != 4 or latents.shape[2] != latents.shape[3] or not latents.is_floating_point():
        raise ValueError(
            f"{root}: {part}_latents is {latents.dtype} of shape {tuple(latents.shape)}; floats (N, C, Y, X) with "
            "Y = X are required"
        )
    if labels.shape != latents.shape[:1] or labels.is_floating_point() or not len(labels) or int(labels.min()) < 0:
        raise ValueError(
            f"{root}: {part}_labels is {labels.dtype} of shape {tuple(labels.shape)}; integers from 0 of shape "
            f"({len(latents)},) are required, one for each of {part}_latents"
        )
    return latents, labels.long()


def read_array(root: Path, name: str) -> Tensor:
    path = next((root / (name + suffix) for suffix in SUFFIXES if (root / (name + suffix)).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{root / name}[{'|'.join(SUFFIXES)}] is missing. {how_to_get(root)}")
    try:
        found = torch.load(path, mmap=True, weights_only=True) if path.suffix == ".pt" else np.load(path, mmap_mode="r")
    except (EOFError, RuntimeError, ValueError, UnpicklingError) as error:
        raise ValueError(f"{path} is not a whole array ({error}); get it again") from error
    if not isinstance(found, (Tensor, np.ndarray)):
        raise ValueError(f"{path} holds a {type(found).__name__}; one array is required")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(found)


def how_to_get(root: Path) -> str:
    return (
        f"Encode a folder of images, as of data=image_folder, by `pip install diffusers && python -m train.data.encode "
        f"IMAGES {root}`"
    )
