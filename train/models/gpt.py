"""A byte- or token-level language model."""

import torch
from torch import Generator, Tensor, nn

from train.models.transformer import FUSED, Transformer, initialise


class GPT(nn.Module):
    """Causal Transformer with learned positions; the head is a matrix of its own (as in the paper) unless ``tied``."""

    fused = FUSED

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        width: int,
        depth: int,
        heads: int,
        tied: bool = False,
        generator: Generator,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.transformer = Transformer(width, depth, heads, causal=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight
        initialise(self, generator)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) integers
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token(tokens) + self.position(positions)  # (B, T, W)
        x = self.transformer(x)  # (B, T, W)
        return self.head(x)  # (B, T, vocabulary)
