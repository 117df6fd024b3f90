"""Arithmetic as written: the caller's reduced-precision settings stay out of the optimizer's products."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from splus.teams import local

LOW_PRECISION = (torch.bfloat16, torch.float16)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of factors, bases, momentum and averages: fp64 for fp64 parameters, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def full_precision(parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The weights being trained, as this rank holds them: the parameter itself, or the fp32 copy ``state["weights"]``
    of a low-precision one.

    Entries of the parameter that are no longer the rounded copy were set by someone else since, and win.
    """
    parameter = local(parameter)
    if parameter.dtype not in LOW_PRECISION:
        return parameter
    weights = local(state["weights"])
    return torch.where(weights.to(parameter.dtype) == parameter, weights, parameter.to(weights.dtype), out=weights)


@contextmanager
def exact_arithmetic(device_types: set[str]) -> Iterator[None]:
    """Full fp32 matrix products and no autocast inside; the caller's settings are as they were outside.

    TF32 and bf16 products turn the basis of an ill-conditioned factor by tens of degrees, so a user's setting
    for the model must not reach the factors or their decomposition.
    """
    with ExitStack() as stack:
        for device_type in device_types:
            if torch.amp.is_autocast_available(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(_full_fp32_products())
        yield


@contextmanager
def _full_fp32_products() -> Iterator[None]:
    # torch 2.9 replaced one global setting by one for each backend and operator; reading the old one after the new
    # one was set raises, so only the new ones are touched where they exist.
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn]
    if hasattr(backends[1], "matmul"):
        backends[1] = backends[1].matmul
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before):
                # A backend that was never set reads what it inherits; left explicit, it would not follow any more.
                backend.fp32_precision = "none"
                if backend.fp32_precision != precision:
                    backend.fp32_precision = precision
    else:
        precision = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
