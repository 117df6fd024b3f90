"""Batches and held-out sets: drawn from their generator alone, read from every layout, errors that say what to do."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from runs import smoke
from stand_ins import seeded, write_cifar, write_classes, write_documents, write_idx, write_text

from train.config import build
from train.data import image_folder
from train.data.hugging_face import hugging_face as documents
from train.data.image_folder import ImageFolder
from train.data.images import FILES, Images
from train.data.text import Text


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(context=32)


@pytest.fixture(scope="module")
def images() -> Images:
    return Images()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> ImageFolder:
    return ImageFolder(write_classes(tmp_path_factory.mktemp("classes")), size=8)


def test_text_that_ships_is_whole(text):
    assert (len(text.train), len(text.held_out)) == (10_227_072, 534_548)


def test_images_that_ship_are_whole(images):
    assert images.padded.shape == (12_000, 32, 32, 1)
    assert images.held_out.shape == (2_000, 28, 28, 1)
    assert images.labels.bincount().min() > 1_000
    assert "Copyright © 2017 Zalando SE" in (FILES / "README.md").read_text()


@pytest.mark.parametrize("data", ["text", "images", "folder"])
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
    with pytest.raises(ValueError, match="context=64 needs more held-out text than the 50 tokens"):
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
@pytest.mark.parametrize("place", ["", "FashionMNIST/raw", "MNIST/raw"])
def test_idx_files_are_read_plain_and_packed_in_either_place(tmp_path, suffix, place):
    write_idx(tmp_path / place, suffix)
    data = Images(str(tmp_path), shift=0, flip=False)
    assert data.sizes == {"image_size": 4, "channels": 1, "classes": 3}
    assert data.held_out.flatten().tolist() == list(range(96))


@pytest.mark.parametrize("place", ["", "cifar-10-batches-py"])
def test_cifar_10_is_read_from_the_layout_of_torchvision(tmp_path, place):
    batches = [f"data_batch_{i}" for i in range(1, 6)]
    write_cifar(tmp_path / place, *batches, "test_batch", key=b"labels", labels=[0, 9])
    data = Images(str(tmp_path))
    assert data.sizes == {"image_size": 32, "channels": 3, "classes": 10}
    assert len(data.labels) == 10
    assert data.held_out[1, 5, 7].tolist() == [1, 2, 3]


@pytest.mark.parametrize("place", ["", "cifar-100-python"])
def test_cifar_100_is_read_with_its_hundred_classes(tmp_path, place):
    write_cifar(tmp_path / place, "train", "test", "meta", key=b"fine_labels", labels=[0, 99])
    data = Images(str(tmp_path))
    assert data.sizes == {"image_size": 32, "channels": 3, "classes": 100}
    assert data.held_out_labels.tolist() == [0, 99]


def test_one_of_several_data_sets_must_be_chosen(tmp_path):
    """As they are side by side in the root that torchvision is given."""
    write_idx(tmp_path / "FashionMNIST" / "raw")
    place = write_idx(tmp_path / "MNIST" / "raw")
    with pytest.raises(ValueError, match=f"holds several data sets; give one of .*FashionMNIST/raw, {place}"):
        Images(str(tmp_path))
    assert len(Images(place).labels) == 6


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


def test_folders_are_classes_in_the_order_of_their_names(folder):
    assert folder.sizes == {"image_size": 8, "channels": 3, "classes": 2}
    assert folder.labels.tolist() == [0, 0, 1, 1, 1]
    assert [Path(path).parent.name for path in folder.files] == ["cat"] * 2 + ["dog"] * 3
    assert folder.validation(4)[1].tolist() == [0, 0, 1, 1]  # the first files would all be cats


@pytest.mark.parametrize(("flip", "least", "most"), [(True, 0.4, 0.6), (False, 1, 1)])
def test_half_of_the_training_images_are_mirrored_if_any(tmp_path, flip, least, most):
    images = ImageFolder(write_classes(tmp_path), 8, flip).batch(200, seeded())[0].mean((1, 2))  # (B, X)
    assert least <= (images[:, -1] >= images[:, 0]).float().mean() <= most


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (64, 64), (900, 100), (1, 1)])
def test_training_crops_keep_to_their_bounds(width, height):
    areas = []
    for crops in torch.rand(200, image_folder.ATTEMPTS, 4, generator=seeded()).tolist():
        left, top, right, bottom = image_folder.random_box(width, height, crops)
        assert 0 <= left < right <= width + 1e-9
        assert 0 <= top < bottom <= height + 1e-9
        assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9
        areas.append((right - left) * (bottom - top) / (width * height))
    assert 0.05 <= min(areas) < 0.1
    assert max(areas) > (0.14 if width == 900 else 0.8)  # the largest crop of 900 × 100 is 133 × 100


def test_held_out_images_are_the_square_in_the_middle(tmp_path):
    wide = Image.new("RGB", (12, 8), "red")
    wide.paste((0, 51, 255), (2, 0, 10, 8))
    wide.save(tmp_path / "wide.png")
    assert (image_folder.decoded(str(tmp_path / "wide.png"), 8) == torch.tensor([0, 51, 255])).all()


def test_jpegs_decoded_at_a_fraction_look_the_same(tmp_path):
    seen = []
    for path in (tmp_path / "picture.jpg", tmp_path / "picture.png"):
        Image.linear_gradient("L").resize((640, 480)).save(path)
        seen.append(image_folder.decoded(str(path), 16, [[0.25, 0.5, 0.5, 0.9]]).int())
    assert (seen[0] - seen[1]).abs().max() <= 3


@pytest.mark.parametrize(
    ("mode", "colour", "grey"),
    [("I;16", 25600, 100), ("LA", (200, 255), 200), ("RGBA", (9, 9, 9, 0), 0), ("CMYK", (0, 0, 0, 55), 200)],
)
def test_images_of_every_mode_are_seen_in_colour(tmp_path, mode, colour, grey):
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.png")
    Image.new(mode, (9, 9), colour).save(path)
    assert image_folder.decoded(str(path), 2)[0, 0].tolist() == [grey] * 3


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    root = Path(write_classes(tmp_path))
    broken = root / "val" / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ValueError, match=f"{broken} is not an image that Pillow can read"):
        ImageFolder(str(root), size=8).validation(1)
    (root / "val" / "fox").mkdir()
    with pytest.raises(ValueError, match=r"val has classes that .*train has not: fox"):
        ImageFolder(str(root), size=8)
    (root / "train" / "fox").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train/fox holds no .jpg.*must look like .*<class>.*torchvision"):
        ImageFolder(str(root), size=8)
    with pytest.raises(FileNotFoundError, match=r"nowhere/train holds no folder for each class.*image-net.org"):
        ImageFolder(str(root / "nowhere"), size=8)


def test_other_data_needs_no_more_than_its_name_and_place(tmp_path):
    place = write_documents(tmp_path / "texts", "abc" * 500)
    text = smoke("language_modelling", "adam", "data=hugging_face", "data.name=some/texts", f"data.directory={place}")
    assert build(text.data).batch(2, seeded()).shape == (2, text.preset.text.context + 1)
    place = write_classes(tmp_path / "images")
    for objective in ("image_classification", "diffusion"):
        config = smoke(objective, "adam", "data=image_folder", f"data.directory={place}", "data.size=32")
        assert build(config.model, **build(config.data).sizes, generator=seeded()).patch == 16
    for lacking in (lambda: documents(2, None), lambda: ImageFolder(None, size=8)):
        with pytest.raises(ValueError, match=r"needs data\.(name|directory)"):
            lacking()
