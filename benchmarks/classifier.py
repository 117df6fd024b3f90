"""A classifier trained on the data of a diffusion run, which judges its samples; and Inception-v3, for FID."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from benchmarks.cells import compose_config
from benchmarks.command import SettingError
from train.config import config_hash
from train.loop import run
from train.models.vit import ViT
from train.objectives import EVALUATION_BATCH
from train.trainer import Trainer

INCEPTION_FEATURES = 2048  # FID: the last pooling layer of Inception-v3 (arXiv 1706.08500)


@dataclass(frozen=True)
class Judged:
    """What is known of N images: features (N, d), predicted labels (N,), features of Inception-v3 if asked for."""

    features: Tensor
    labels: Tensor
    inception: Tensor | None


class Judge:
    """Gathers what a classifier and, if given, Inception-v3 say of images (B, C, Y, X) in [-1, 1]."""

    def __init__(self, classifier: ViT, inception: Callable[[Tensor], Tensor] | None = None) -> None:
        self.classifier, self.inception = classifier, inception
        self.device = classifier.head.weight.device

    @torch.no_grad()
    def __call__(self, batches: Iterable[Tensor]) -> Judged:
        features, labels, inception = [], [], []
        for images in (part for batch in batches for part in batch.to(self.device).split(EVALUATION_BATCH)):
            features.append(self.classifier.features(images))
            labels.append(self.classifier.head(features[-1]).argmax(1).cpu())
            if self.inception is not None:
                inception.append(self.inception(images).cpu())
        return Judged(torch.cat(features).cpu(), torch.cat(labels), torch.cat(inception) if inception else None)


def classifier_config(settings: Sequence[str], data_config: DictConfig, data: Any) -> DictConfig:
    """The run that trains a classifier with these settings on this data.

    Raises:
        SettingError: the data are not grey or coloured pixels.
    """
    sizes = data.sizes
    if sizes["channels"] not in (1, 3):
        raise SettingError(
            f"the runs' data has {sizes['channels']} channels; the classifier needs pixels, which have 1 or 3: decode "
            "samples that are an autoencoder's latents, and measure the images elsewhere"
        )
    composed = compose_config(
        ("objective=image_classification", f"model.patch={patch_size(sizes['image_size'])}", *settings)
    )
    config = OmegaConf.create(OmegaConf.to_container(composed))
    assert isinstance(config, DictConfig)
    config.data = data_config
    config.validation_examples = min(config.validation_examples, len(data.held_out))
    config.keep_checkpoint = True
    return config


def patch_size(side: int) -> int:
    """The largest divisor of the image's side up to 8 or a sixteenth of it: 7 of 28, 8 of 32, 16 of 256 pixels."""
    return max(size for size in range(1, max(8, side // 16) + 1) if side % size == 0)


def trained_classifier(config: DictConfig, root: Path) -> ViT:
    """The classifier of a configuration, trained in ``root`` unless it is there; with its averaged weights, if any.

    Raises:
        SettingError: its training diverged, or its checkpoint is gone.
    """
    directory = root / f"classifier-{config_hash(config)}"
    if not (directory / "result.json").exists():
        print(f"A classifier is trained in {directory}, once: {config.steps} steps")
    result = run(config, directory)
    if result["status"] != "finished":
        raise SettingError(f"the classifier in {directory} {result['status']}; change classifier=[…]")
    trainer = Trainer(config)
    if not trainer.resume(directory):
        raise SettingError(f"{directory} has a result but no checkpoint; delete it to train the classifier again")
    with trainer.averaged_weights():
        model = copy.deepcopy(trainer.model)
    assert isinstance(model, ViT)
    return model


def inception(device: torch.device) -> Callable[[Tensor], Tensor]:
    """The features (B, 2048) of Inception-v3 that FID is defined by, of images (B, 1 or 3, Y, X) in [-1, 1].

    Images are rounded to bytes and resized as TensorFlow 1 did. Nothing is downloaded.

    Raises:
        SettingError: torch-fidelity or its weights are not there.
    """
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # torchvision raises RuntimeError beside another torch than its own
        raise SettingError(
            f"fid=true needs torch-fidelity, which cannot be imported ({error}); pip install '.[fid]' with the "
            "torchvision of this torch, or leave fid=false"
        ) from None
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(URL_INCEPTION_V3).name
    if not path.is_file():
        raise SettingError(
            f"fid=true needs the weights of Inception-v3 in {path}, which is not there; get them by "
            f"`curl --create-dirs --location --output {path} {URL_INCEPTION_V3}`, or leave fid=false"
        )
    model = FeatureExtractorInceptionV3("inception-v3-compat", [str(INCEPTION_FEATURES)], str(path)).to(device)

    def features(images: Tensor) -> Tensor:
        pixels = ((images + 1) * 127.5).round().to(torch.uint8)
        return model(pixels.expand(-1, 3, -1, -1))[0]

    return features
