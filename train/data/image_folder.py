"""Labelled images in a folder for each class, as ImageNet has them: decoded when they are drawn, never all at once."""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Generator, Tensor

from train.data.images import check_examples, scaled

SUFFIXES = (".jpg", ".jpeg", ".png")
AREA = (0.05, 1.0)  # of the image, that a training crop covers: the paper's experiments (arXiv 2506.07254)
ASPECT = (3 / 4, 4 / 3)  # width over height of a training crop: Inception (arXiv 1409.4842), and torchvision
ATTEMPTS = 10  # crops drawn until one fits into the image, before the largest one is taken: torchvision
THREADS = min(32, os.cpu_count() or 1)  # Pillow decodes and resizes without Python's lock

Box = tuple[float, float, float, float]  # left, top, right and bottom, in pixels


class ImageFolder:
    """Images (N, 3, size, size) scaled to [-1, 1] with labels (N,), the classes in the order of their names.

    A training image is a random crop of an image, resized, and mirrored half of the time; a held-out one is the
    largest square in the middle, resized.

    Args:
        directory: holds ``train/<class>/*.jpg`` and ``val/<class>/*.jpg`` (or ``.jpeg``, ``.png``), as torchvision's
            ``ImageFolder`` and ``ImageNet``.
        size: pixels on a side.
        flip: training images are mirrored half of the time.
    """

    def __init__(self, directory: str | None, size: int, flip: bool = True) -> None:
        if directory is None:
            raise ValueError(f"data=image_folder needs data.directory=DIR. {how_to_get(Path('DIR'))}")
        self.size, self.flip = size, flip
        root = Path(directory)
        self.classes = class_names(root, "train")
        self.files, self.labels = listed(root, "train", self.classes)
        self.held_out, self.held_out_labels = listed(root, "val", self.classes)

    @property
    def sizes(self) -> dict[str, int]:
        """What a model of this data must know."""
        return {"image_size": self.size, "channels": 3, "classes": len(self.classes)}

    def batch(self, size: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Augmented training images (size, 3, Y, X) and their labels (size,)."""
        chosen = torch.randint(len(self.files), (size,), generator=generator)  # (B,)
        crops = torch.rand(size, ATTEMPTS, 4, generator=generator).tolist()
        mirrored = (torch.rand(size, generator=generator) < 0.5).tolist()

        def augmented(i: int) -> Tensor:
            pixels = decoded(self.files[chosen[i]], self.size, crops[i])
            return pixels.flip(1) if self.flip and mirrored[i] else pixels

        with ThreadPoolExecutor(THREADS) as pool:
            pixels = torch.stack(list(pool.map(augmented, range(size))))  # (B, Y, X, 3)
        return scaled(pixels), self.labels[chosen]

    def validation(self, examples: int) -> tuple[Tensor, Tensor]:
        """The same held-out images (examples, 3, Y, X) every time, evenly spaced over the classes, and their labels."""
        check_examples(examples, len(self.held_out))
        chosen = torch.arange(examples) * (len(self.held_out) - 1) // max(1, examples - 1)
        with ThreadPoolExecutor(THREADS) as pool:
            pixels = list(pool.map(lambda i: decoded(self.held_out[i], self.size), chosen))
        return scaled(torch.stack(pixels)), self.held_out_labels[chosen]


def decoded(path: str, size: int, crops: list[list[float]] | None = None) -> Tensor:
    """A crop of an image, uint8 (size, size, 3): the first of ``crops`` that fits, or the square in the middle."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            box = centred(width, height, 1, 1) if crops is None else random_box(width, height, crops)
            # A JPEG is decoded at a half, a quarter or an eighth of its size where that is still finer than needed.
            wanted = size * width / (box[2] - box[0]), size * height / (box[3] - box[1])
            image.draft(None, (math.ceil(wanted[0]), math.ceil(wanted[1])))
            x, y = image.width / width, image.height / height
            box = (box[0] * x, box[1] * y, min(box[2] * x, image.width), min(box[3] * y, image.height))
            pixels = in_colour(image).resize((size, size), Image.Resampling.BILINEAR, box)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow raises SyntaxError for some PNGs
        raise ValueError(f"{path} is not an image that Pillow can read ({error}); get it again or remove it") from error
    return torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8).view(size, size, 3)


def in_colour(image: Image.Image) -> Image.Image:
    """Red, green and blue from grey, palettes, CMYK and transparency; the latter over black."""
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would clip to 8
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
    return image.convert("RGB")


def random_box(width: int, height: int, crops: list[list[float]]) -> Box:
    """The first of the crops, four numbers in [0, 1) each, that fits into an image of this size."""
    for area, aspect, x, y in crops:
        area = (AREA[0] + (AREA[1] - AREA[0]) * area) * width * height
        aspect = ASPECT[0] * (ASPECT[1] / ASPECT[0]) ** aspect
        across, down = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if across <= width and down <= height:
            left, top = x * (width - across), y * (height - down)
            return left, top, left + across, top + down
    return centred(width, height, *ASPECT)


def centred(width: int, height: int, narrowest: float, widest: float) -> Box:
    """The largest box in the middle of an image whose width over height is within these bounds."""
    across, down = min(width, height * widest), min(height, width / narrowest)
    left, top = (width - across) / 2, (height - down) / 2
    return left, top, left + across, top + down


def class_names(root: Path, part: str) -> list[str]:
    folder = root / part
    names = sorted(path.name for path in folder.iterdir() if is_class(path)) if folder.is_dir() else []
    if not names:
        raise FileNotFoundError(f"{folder} holds no folder for each class. {how_to_get(root)}")
    return names


def is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def listed(root: Path, part: str, classes: list[str]) -> tuple[list[str], Tensor]:
    """The images of a part, sorted by class and name, and their labels (N,)."""
    here = class_names(root, part)
    unknown = sorted(set(here) - set(classes))
    if unknown:
        raise ValueError(f"{root / part} has classes that {root / 'train'} has not: {', '.join(unknown)}")
    files: list[str] = []
    labels: list[int] = []
    for name in here:
        with os.scandir(root / part / name) as entries:
            found = sorted(entry.path for entry in entries if entry.name.lower().endswith(SUFFIXES))
        if not found:
            raise FileNotFoundError(f"{root / part / name} holds no {', '.join(SUFFIXES)}. {how_to_get(root)}")
        files += found
        labels += [classes.index(name)] * len(found)
    return files, torch.tensor(labels)


def how_to_get(root: Path) -> str:
    return (
        f"The folder must look like {root}/train/<class>/*.jpg and {root}/val/<class>/*.jpg (or .jpeg, .png). For "
        f'ImageNet put the archives of https://image-net.org/download in {root} and run `python -c "import '
        f"torchvision; [torchvision.datasets.ImageNet('{root}', split) for split in ('train', 'val')]\"`, which "
        "unpacks them so"
    )
