"""A Vision Transformer that classifies."""

import torch
from einops import rearrange, repeat
from torch import Generator, Tensor, nn

from train.models.transformer import FUSED, Transformer, initialise


def patches(images: Tensor, size: int) -> Tensor:
    """Images (B, C, Y, X) as rows of pixels (B, T, size·size·C), T patches from left to right and top to bottom."""
    return rearrange(images, "b c (y i) (x j) -> b (y x) (i j c)", i=size, j=size)


def patch_count(image_size: int, patch: int) -> int:
    if image_size % patch:
        raise ValueError(f"patch={patch} does not divide the image side of {image_size}; choose one that does")
    return (image_size // patch) ** 2


class ViT(nn.Module):
    """Patches and a class token, whose last state the head reads (arXiv 2010.11929)."""

    fused = FUSED

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
        self.class_token = nn.Parameter(torch.empty(1, width))
        self.position = nn.Parameter(torch.empty(patch_count(image_size, patch) + 1, width))
        self.transformer = Transformer(width, depth, heads)
        self.head = nn.Linear(width, classes, bias=False)
        initialise(self, generator)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, Y, X)
        return self.head(self.features(images))  # (B, classes)

    def features(self, images: Tensor) -> Tensor:  # (B, C, Y, X)
        """The class token after the last norm, which the head reads."""
        x = self.patch_embedding(patches(images, self.patch))  # (B, T, W)
        x = torch.cat([repeat(self.class_token, "1 w -> b 1 w", b=len(x)), x], dim=1)  # (B, 1 + T, W)
        x = self.transformer(x + self.position)  # (B, 1 + T, W)
        return x[:, 0]  # (B, W)
