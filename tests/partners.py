"""What the tests of partners share: a small regression, and weights bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from splus import SPlus


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizer_of(model: nn.Module, **options: Any) -> SPlus:
    return SPlus(model.named_parameters(), lr=0.3, ema_decay=0.8, **options)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def bits(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
