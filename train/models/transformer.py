"""The Transformer that GPT, ViT and DiT share: pre-norm, no biases, optionally causal, optionally conditioned (adaLN).

Shapes: B examples, T tokens, W width, H heads, D = W / H.
"""

import math

import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor, nn

# Fused matrices that optimizers may treat apart: glob patterns of parameter names, and the number of sections of rows.
FUSED = {"*.qkv.weight": 3}


class Attention(nn.Module):
    """Multi-head self-attention; ``qkv`` is one matrix whose rows are those of the queries, the keys, the values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} is not a multiple of heads={heads}; choose heads that divide the width")
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, W)
        qkv = self.qkv(x)  # (B, T, 3W)
        q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=self.heads)  # (B, H, T, D) each
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (B, H, T, D)
        return self.out(rearrange(x, "b h t d -> b t (h d)"))  # (B, T, W)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, W)
        x = F.gelu(self.expand(x))  # (B, T, 4W)
        return self.contract(x)  # (B, T, W)


class Block(nn.Module):
    """Attention, then MLP, each normalised before and added after.

    Conditioned, it follows adaLN-zero (DiT, arXiv 2212.09748, section 3.2): a linear map of the condition shifts and
    scales what the norms give, and gates what is added.
    """

    def __init__(self, width: int, heads: int, causal: bool, conditioned: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False, elementwise_affine=not conditioned)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width, bias=False, elementwise_affine=not conditioned)
        self.mlp = MLP(width)
        self.modulation = nn.Linear(width, 6 * width, bias=False) if conditioned else None

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:  # (B, T, W), (B, W)
        if self.modulation is None:
            x = x + self.attention(self.attention_norm(x))  # (B, T, W)
            return x + self.mlp(self.mlp_norm(x))  # (B, T, W)
        assert condition is not None
        six = rearrange(self.modulation(F.silu(condition)), "b (six w) -> six b 1 w", six=6)  # (6, B, 1, W)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six  # (B, 1, W) each
        x = x + gate_a * self.attention(modulate(self.attention_norm(x), shift_a, scale_a))  # (B, T, W)
        return x + gate_m * self.mlp(modulate(self.mlp_norm(x), shift_m, scale_m))  # (B, T, W)


class Transformer(nn.Module):
    """``depth`` blocks and a last norm. A conditioned one leaves the last norm's shift and scale to its owner."""

    def __init__(self, width: int, depth: int, heads: int, causal: bool = False, conditioned: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, causal, conditioned) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False, elementwise_affine=not conditioned)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:  # (B, T, W), (B, W)
        for block in self.blocks:
            x = block(x, condition)  # (B, T, W)
        return self.norm(x)  # (B, T, W)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale of shape (B, 1, W) applied to x of shape (B, T, W)."""
    return x * (1 + scale) + shift


def initialise(model: nn.Module, generator: Generator) -> None:
    """Draw every weight of a GPT, ViT or DiT from ``generator``, so that it depends on nothing else."""
    depth = sum(isinstance(module, Block) for module in model.modules())
    for name, module in model.named_modules():
        role = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5  # keeps the scale of normalised activations at every width
            if role in ("out", "contract"):
                std /= math.sqrt(2 * depth)  # the residual stream adds 2·depth of them (GPT-2)
            elif role == "head":
                std = 0.02  # GPT-2; near-uniform predictions at the start
            elif role == "modulation":
                std = 0.0  # adaLN-zero: every block is the identity at the start
            nn.init.normal_(module.weight, std=std, generator=generator)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=generator)  # GPT-2
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("position", "class_token"):
            nn.init.normal_(parameter, std=0.02, generator=generator)  # as the embeddings
