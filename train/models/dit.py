"""A Diffusion Transformer: the velocity of an image on its way from noise, given the time and a label."""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor, nn

from train.models.transformer import FUSED, Transformer, initialise, modulate
from train.models.vit import patch_count, patches


class DiT(nn.Module):
    """Patches and adaLN-zero blocks conditioned on time and label (arXiv 2212.09748). Label ``classes`` means none."""

    fused = FUSED | {"*.blocks.*.modulation.weight": 6, "modulation.weight": 2}

    def __init__(
        self,
        *,
        image_size: int,
        channels: int,
        classes: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        generator: Generator,
    ) -> None:
        super().__init__()
        self.patch = patch
        self.patch_embedding = nn.Linear(patch * patch * channels, width, bias=False)
        self.position = nn.Parameter(torch.empty(patch_count(image_size, patch), width))
        self.time_embedding = TimeEmbedding(width)
        self.label_embedding = nn.Embedding(classes + 1, width)
        self.transformer = Transformer(width, depth, heads, conditioned=True)
        self.modulation = nn.Linear(width, 2 * width, bias=False)
        self.head = nn.Linear(width, patch * patch * channels, bias=False)
        initialise(self, generator)
        nn.init.zeros_(self.head.weight)  # DiT: the mean velocity is the first prediction

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:  # (B, C, Y, X), (B,), (B,)
        x = self.patch_embedding(patches(images, self.patch)) + self.position  # (B, T, W)
        condition = self.time_embedding(times) + self.label_embedding(labels)  # (B, W)
        x = self.transformer(x, condition)  # (B, T, W)
        shift, scale = rearrange(self.modulation(F.silu(condition)), "b (two w) -> two b 1 w", two=2)  # (B, 1, W) each
        x = self.head(modulate(x, shift, scale))  # (B, T, patch·patch·C)
        side = images.shape[2] // self.patch
        return rearrange(x, "b (y x) (i j c) -> b c (y i) (x j)", y=side, i=self.patch, j=self.patch)  # (B, C, Y, X)


class TimeEmbedding(nn.Module):
    """Times in [0, 1] as sines and cosines of W/2 frequencies, then a small MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, times: Tensor) -> Tensor:  # (B,)
        half = self.expand.in_features // 2
        exponents = torch.arange(half, device=times.device) / half  # (W/2,)
        # Angles of 1000·t and wavelengths up to 10,000: the time steps and the frequencies of DiT.
        angles = 1000 * times[:, None] * torch.exp(-math.log(10_000) * exponents)  # (B, W/2)
        features = torch.cat([angles.cos(), angles.sin()], dim=1)  # (B, W)
        return self.out(F.silu(self.expand(features)))  # (B, W)
