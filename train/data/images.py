"""Labelled images: random, lightly augmented batches to train on, the first held-out ones to validate on."""

import gzip
import lzma
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor

FILES = Path(__file__).parent / "files"
Labelled = tuple[Tensor, Tensor]  # images, uint8 (N, Y, X, C), and labels, int64 (N,)
UNPACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress}


class Images:
    """Images (N, C, Y, X) scaled to [-1, 1] with labels (N,).

    Args:
        directory: a folder with idx files (Fashion-MNIST, MNIST; plain, ``.gz`` or ``.xz``) or CIFAR's batches, or the
            ``root`` in which torchvision has made one. Default: the part of Fashion-MNIST that ships with the project.
        shift: training images are moved by up to this many pixels each way.
        flip: training images are mirrored half of the time.
    """

    def __init__(self, directory: str | None = None, shift: int = 2, flip: bool = True) -> None:
        data = shipped_images() if directory is None else read_folder(Path(directory))
        (train, self.labels), (self.held_out, self.held_out_labels) = data
        self.padded = F.pad(train, (0, 0, shift, shift, shift, shift))  # (N, Y + 2 shift, X + 2 shift, C)
        self.shift, self.flip = shift, flip

    @property
    def sizes(self) -> dict[str, int]:
        """What a model of this data must know."""
        _, side, _, channels = self.held_out.shape
        return {"image_size": side, "channels": channels, "classes": int(self.labels.max()) + 1}

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Augmented training images (size, C, Y, X) and their labels (size,)."""
        chosen = torch.randint(len(self.padded), (size,), generator=generator)  # (B,)
        corner = torch.randint(2 * self.shift + 1, (2, size, 1), generator=generator)  # (2, B, 1)
        side = torch.arange(self.held_out.shape[1])
        rows, columns = corner[0] + side, corner[1] + side  # (B, Y), (B, X)
        if self.flip:
            mirrored = torch.rand(size, 1, generator=generator) < 0.5  # (B, 1)
            columns = torch.where(mirrored, columns.flip(1), columns)
        pixels = self.padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]  # (B, Y, X, C)
        return scaled(pixels), self.labels[chosen]

    def validation(self, examples: int) -> tuple[Tensor, Tensor]:
        """The first held-out images (examples, C, Y, X) and their labels (examples,), as they are."""
        check_examples(examples, len(self.held_out))
        return scaled(self.held_out[:examples]), self.held_out_labels[:examples]


def check_examples(examples: int, held_out: int) -> None:
    if examples > held_out:
        raise ValueError(f"validation_examples={examples} but only {held_out} images are held out")


def scaled(pixels: Tensor) -> Tensor:
    """Bytes (B, Y, X, C) as numbers in [-1, 1] of shape (B, C, Y, X)."""
    return rearrange(pixels, "b y x c -> b c y x").float() / 127.5 - 1


@cache  # a process that trains many models unpacks them once
def shipped_images() -> tuple[Labelled, Labelled]:
    """Training and held-out images."""
    return read_idx(FILES, "fashion-train"), read_idx(FILES, "fashion-t10k")


def read_folder(root: Path) -> tuple[Labelled, Labelled]:
    """Training and held-out images, by the layout that the folder has."""
    found = {root / place: read for place, marker, read in LAYOUTS if any((root / place).glob(marker))}
    if not found:
        raise FileNotFoundError(
            f"data.directory={root} holds neither train-images-idx3-ubyte[.gz|.xz] nor CIFAR's batches, nor does a "
            f"folder of torchvision's in it. {how_to_get(root)}"
        )
    if len(found) > 1:
        raise ValueError(f"data.directory={root} holds several data sets; give one of {', '.join(map(str, found))}")
    ((folder, read),) = found.items()
    return read(folder)


def how_to_get(root: Path) -> str:
    by_torchvision = "`python -c \"import torchvision; torchvision.datasets.{name}('{root}', download=True)\"`"
    return (
        "Get Fashion-MNIST by `apt-get install dataset-fashion-mnist` (then in /usr/share/datasets/fashion-mnist) or "
        f"{by_torchvision.format(name='FashionMNIST', root=root)}; CIFAR-10 by "
        f"{by_torchvision.format(name='CIFAR10', root=root)}, MNIST and CIFAR100 likewise; or leave data.directory "
        "unset for the images that ship"
    )


def read_idx(folder: Path, part: str) -> Labelled:
    images = read_idx_file(folder, f"{part}-images-idx3-ubyte")  # (N, Y, X)
    labels = read_idx_file(folder, f"{part}-labels-idx1-ubyte")  # (N,)
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images but {len(labels)} labels in {part}; get the files again")
    return images[..., None], labels.long()


def read_idx_file(folder: Path, name: str) -> Tensor:
    """An idx file of bytes: two zero bytes, type 8, the number of dimensions, each of them big-endian, the data."""
    paths = {folder / (name + suffix): unpack for suffix, unpack in UNPACK.items()}
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder / name}[.gz|.xz] is missing. {how_to_get(folder)}")
    content = paths[path](path.read_bytes())
    rank = content[3] if content[:3] == b"\0\0\x08" else 0
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank)]
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)[4 + 4 * rank :]
    if rank == 0 or len(data) != torch.Size(shape).numel():
        raise ValueError(f"{path} is not a whole idx file of bytes: shape {shape}, {len(data)} bytes; get it again")
    return data.view(shape)


def read_cifar(paths: list[Path], key: bytes) -> Labelled:
    """Pickled batches; rows of 3072 bytes are the red, green and blue planes of 32 × 32."""
    images, labels = [], []
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing. {how_to_get(path.parent.parent)}")
        with open(path, "rb") as file:
            content = pickle.load(file, encoding="bytes")
        images.append(rearrange(torch.as_tensor(content[b"data"]), "n (c y x) -> n y x c", c=3, y=32))
        labels.append(torch.tensor(content[key]))
    return torch.cat(images), torch.cat(labels)


def idx(folder: Path) -> tuple[Labelled, Labelled]:
    return read_idx(folder, "train"), read_idx(folder, "t10k")


def cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    train = read_cifar([folder / f"data_batch_{i}" for i in range(1, 6)], b"labels")
    return train, read_cifar([folder / "test_batch"], b"labels")


def cifar100(folder: Path) -> tuple[Labelled, Labelled]:
    return read_cifar([folder / "train"], b"fine_labels"), read_cifar([folder / "test"], b"fine_labels")


IDX = "train-images-idx3-ubyte*"
# A place, a file by which a data set there is recognised, and what reads it.
LAYOUTS: tuple[tuple[str, str, Callable[[Path], tuple[Labelled, Labelled]]], ...] = (
    ("", IDX, idx),
    ("FashionMNIST/raw", IDX, idx),
    ("MNIST/raw", IDX, idx),
    ("", "data_batch_*", cifar10),
    ("cifar-10-batches-py", "data_batch_*", cifar10),
    ("", "meta", cifar100),
    ("cifar-100-python", "meta", cifar100),
)
