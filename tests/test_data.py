"""Batches and held-out sets: drawn from their generator alone, read from every layout, errors that say what to do."""

import gzip
import lzma
import pickle
from pathlib import Path

import pytest
import torch
from torch import Generator

from train.data.images import FILES, Images
from train.data.text import Text


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(context=32)


@pytest.fixture(scope="module")
def images() -> Images:
    return Images()


def write_text(folder: Path, *parts: bytes) -> str:
    for i, part in enumerate(parts):
        (folder / f"{i}.txt").write_bytes(part)
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


def test_text_that_ships_is_whole(text):
    assert (len(text.train), len(text.held_out)) == (10_227_072, 534_548)


def test_images_that_ship_are_whole(images):
    assert images.padded.shape == (12_000, 32, 32, 1)
    assert images.held_out.shape == (2_000, 28, 28, 1)
    assert images.labels.bincount().min() > 1_000
    assert "Copyright © 2017 Zalando SE" in (FILES / "README.md").read_text()


@pytest.mark.parametrize("data", ["text", "images"])
def test_batches_depend_on_their_generator_alone(data, request):
    data = request.getfixturevalue(data)
    torch.manual_seed(1)
    first = data.batch(8, seeded())
    torch.manual_seed(2)
    torch.testing.assert_close(first, data.batch(8, seeded()), rtol=0, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first, data.batch(8, seeded(1)), rtol=0, atol=0)


def test_windows_are_pieces_of_the_training_text(text):
    content = text.train.numpy().tobytes()
    for window in text.batch(8, seeded()):
        assert len(window) == 33
        assert bytes(window.tolist()) in content


def test_validation_windows_span_the_held_out_text_evenly(text):
    windows = text.validation(5)
    held_out = text.held_out.long()
    torch.testing.assert_close(windows[0], held_out[:33])
    torch.testing.assert_close(windows[-1], held_out[-33:])
    middle = (len(held_out) - 33) // 2
    torch.testing.assert_close(windows[2], held_out[middle : middle + 33])


def test_own_text_keeps_its_last_twentieth_for_validation(tmp_path):
    data = Text(context=4, directory=write_text(tmp_path, b"a" * 500, b"b" * 499))
    assert (len(data.train), len(data.held_out)) == (950, 50)
    assert bytes(data.held_out.tolist()) == b"b" * 50


def test_text_too_short_for_the_context_is_refused(tmp_path):
    with pytest.raises(ValueError, match="context=64 needs more held-out text than the 50 bytes"):
        Text(context=64, directory=write_text(tmp_path, b"a" * 1000))


def test_augmented_images_are_shifted_mirrored_originals(tmp_path):
    data = Images(write_idx(tmp_path), shift=1, flip=True)
    shifted = [data.padded[:, y : y + 4, x : x + 4] for y in range(3) for x in range(3)]
    possible = torch.stack(shifted + [image.flip(2) for image in shifted])  # (18, N, Y, X, C)
    batch, labels = data.batch(200, seeded())
    seen = set()
    for image, label in zip(batch, labels):
        pixels = ((image + 1) * 127.5).round().byte().permute(1, 2, 0)
        matches = (possible == pixels).flatten(2).all(2).nonzero().tolist()
        assert any(data.labels[n] == label for _, n in matches)
        seen |= {way for way, _ in matches}
    assert seen == set(range(18))


def test_held_out_images_are_left_as_they_are(images):
    batch, labels = images.validation(7)
    torch.testing.assert_close(batch, images.held_out[:7].permute(0, 3, 1, 2) / 127.5 - 1)
    assert torch.equal(labels, images.held_out_labels[:7])
    assert batch.min() == -1
    assert batch.max() == 1
    with pytest.raises(ValueError, match="validation_examples=3000 but only 2000"):
        images.validation(3000)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("place", ["", "FashionMNIST/raw"])
def test_idx_files_are_read_plain_and_packed_in_either_place(tmp_path, suffix, place):
    write_idx(tmp_path / place, suffix)
    data = Images(str(tmp_path), shift=0, flip=False)
    assert data.sizes == {"image_size": 4, "channels": 1, "classes": 3}
    assert data.held_out.flatten().tolist() == list(range(96))


def test_cifar_is_read_from_the_layout_of_torchvision(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    row = [1] * 1024 + [2] * 1024 + [3] * 1024  # red, green, blue
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({b"data": [row, row], b"labels": [0, 9]}))
    data = Images(str(tmp_path))
    assert data.sizes == {"image_size": 32, "channels": 3, "classes": 10}
    assert len(data.labels) == 10
    assert data.held_out[1, 5, 7].tolist() == [1, 2, 3]


def test_missing_files_are_named_with_the_command_that_gets_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}.*apt-get install dataset-fashion-mnist.*torchvision"):
        Images(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} holds no \*.txt"):
        Text(context=4, directory=str(tmp_path))
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"t10k-labels-idx1-ubyte\[.gz|.xz\] is missing. Get Fashion-MNIST by"):
        Images(str(tmp_path))


def test_half_a_file_is_refused_by_name(tmp_path):
    path = Path(write_idx(tmp_path)) / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{path} is not a whole idx file"):
        Images(str(tmp_path))
