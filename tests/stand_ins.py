"""Small data sets on disk in the layouts of large ones."""

import gzip
import lzma
import pickle
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Generator, Tensor

SQUARES = b"".join(b"%d is %d squared\n" % (i * i, i) for i in range(2000))
LABELS = [0, 2, 1, 2, 0, 1]  # of write_latents


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def write_text(folder: Path, *parts: bytes) -> str:
    for i, part in enumerate(parts):
        (folder / f"{i}.txt").write_bytes(part)
    return str(folder)


def write_documents(folder: Path, *texts: str | None) -> str:
    datasets.Dataset.from_dict({"id": range(len(texts)), "text": texts}).save_to_disk(folder)
    return str(folder)


def write_gpt2(folder: Path, *texts: str) -> str:
    """vocab.json and merges.txt as of GPT-2, of 300 tokens."""
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    encoder.train_from_iterator(texts or (SQUARES.decode(),), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    encoder.model.save(str(folder))
    return str(folder)


def write_idx(folder: Path, suffix: str = "", images: int = 6) -> str:
    """Six training and six held-out images of 4 × 4 with pixels and labels that tell them apart."""
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        header = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (images, 4, 4))
        (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(pack(header + bytes(range(images * 16))))
        labels = b"\0\0\x08\x01" + images.to_bytes(4, "big") + bytes(i % 3 for i in range(images))
        (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(pack(labels))
    return str(folder)


def write_cifar(folder: Path, *names: str, key: bytes, labels: list[int]) -> str:
    """An image for each label in every file, red 1, green 2 and blue 3."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[1] * 1024 + [2] * 1024 + [3] * 1024 for _ in labels]
    for name in names:
        (folder / name).write_bytes(pickle.dumps({b"data": rows, key: labels}))
    return str(folder)


def write_classes(root: Path) -> str:
    """Pictures of 12 × 10, two of cats and three of dogs to train on, four of each held out; left darker than right."""
    picture = Image.linear_gradient("L").rotate(90).resize((12, 10))
    for part, name, count in (("train", "dog", 3), ("train", "cat", 2), ("val", "dog", 4), ("val", "cat", 4)):
        (root / part / name).mkdir(parents=True)
        for i in range(count):
            picture.save(root / part / name / f"{i}.{('png', 'JPEG', 'jpg', 'PNG')[i]}")
    return str(root)


def write_latents(folder: Path, suffix: str = ".npy", **changes: Tensor) -> str:
    """Six of (4, 8, 8) to train on, six held out: half precision, the n-th of them all filled with n."""
    folder.mkdir(exist_ok=True)
    numbers = torch.arange(6, dtype=torch.half)[:, None, None, None].expand(6, 4, 8, 8).contiguous()
    content = dict.fromkeys(("train_latents", "val_latents"), numbers)
    content |= dict.fromkeys(("train_labels", "val_labels"), torch.tensor(LABELS))
    for name, tensor in (content | changes).items():
        if suffix == ".pt":
            torch.save(tensor, folder / (name + suffix))
        else:
            np.save(folder / name, tensor.numpy())
    return str(folder)
