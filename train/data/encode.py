"""python -m train.data.encode IMAGES LATENTS [--model stabilityai/sd-vae-ft-mse] [--size 256] [--batch 32]

Encodes a folder of images, as of data=image_folder, into what data=latents reads, by an autoencoder of the diffusers
library: a folder, or a name on the Hub, from which it is downloaded. Every image is seen once, as the square in the
middle; its latents are the mean of their distribution, in half precision.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from train.data.image_folder import THREADS, ImageFolder, decoded
from train.data.images import scaled


def autoencoder(model: str) -> Callable[[Tensor], Tensor]:
    """From images (B, 3, Y, X) in [-1, 1] to latents (B, C, y, x)."""
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise SystemExit("train.data.encode needs the diffusers library: `pip install diffusers`") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = AutoencoderKL.from_pretrained(model).to(device).eval()
    return lambda images: network.encode(images.to(device)).latent_dist.mean.cpu()


@torch.no_grad()
def encode(images: ImageFolder, encoder: Callable[[Tensor], Tensor], directory: Path, batch: int) -> None:
    """Latents and labels of all images into ``directory``; a file gets its name when it is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = {"train": (images.files, images.labels), "val": (images.held_out, images.held_out_labels)}
    for part, (files, labels) in parts.items():
        path = directory / f"{part}_latents.npy"
        temporary = path.with_suffix(".new")
        array: np.memmap | None = None
        with ThreadPoolExecutor(THREADS) as pool:
            for start in tqdm(range(0, len(files), batch), desc=f"Writing {path}", dynamic_ncols=True):
                chosen = files[start : start + batch]
                pixels = torch.stack(list(pool.map(lambda path: decoded(path, images.size), chosen)))
                latents = encoder(scaled(pixels)).half().numpy()
                if array is None:
                    shape = (len(files), *latents.shape[1:])
                    array = np.lib.format.open_memmap(temporary, "w+", np.float16, shape)
                array[start : start + batch] = latents
        assert array is not None  # a folder of images has some
        array.flush()
        np.save(directory / f"{part}_labels.npy", labels.numpy())
        temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="holds train/<class>/*.jpg and val/<class>/*.jpg")
    parser.add_argument("latents", type=Path, help="the folder to write")
    parser.add_argument("--model", default="stabilityai/sd-vae-ft-mse", help="a folder, or a name on the Hub")
    parser.add_argument("--size", type=int, default=256, help="pixels on a side")
    parser.add_argument("--batch", type=int, default=32, help="images encoded at once")
    options = parser.parse_args()
    images = ImageFolder(options.images, options.size)
    encode(images, autoencoder(options.model), options.latents, options.batch)


if __name__ == "__main__":
    main()
