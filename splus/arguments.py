"""The arguments of SPlus: their defaults where a measurement chose them, the published ones, and their checks."""

import operator
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch
from torch import Tensor

# Settings with which SPlus follows the authors' PyTorch file (kvfrans/splus d96bd16) exactly: SPlus(params, **PAPER).
PAPER: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 0.0,
        "normalization_decay": 0.0,
        "weight_decay": 1e-2,
        "ema_decay": 0.999,
        "precondition_frequency": 100,
        "max_preconditioner_dim": 10_000,
        "elementwise_scale": 1e-3,
        "step_norm": "frobenius",
        "whiten": "2d",
        "oversized": "published",
        "sides": "both",
        "refresh_method": "eigh",
        "refresh_growth": None,
        "spread_refreshes": False,
    }
)

# What decides the shapes of the state. A loaded state dict must agree on these; it brings all the others.
STRUCTURAL = (
    "max_preconditioner_dim",
    "whiten",
    "split",
    "split_dim",
    "stacked",
    "oversized",
    "sides",
    "step_scale",
    "step_norm",
    "normalization_decay",
)

_CHOICES: dict[str, tuple[object, ...]] = {
    "whiten": (True, False, "auto", "2d"),
    "oversized": ("blocks", "unrotated", "published"),
    "sides": ("auto", "both", "shorter"),
    "step_norm": ("spectral", "frobenius"),
    "step_scale": ("shape", "fan_in", "none"),
    "matmul_dtype": (None, torch.bfloat16, torch.float32, torch.float64),  # not fp16: small gradients vanish in it
    "refresh_method": ("qr", "eigh"),
    "scale_weight_decay": (True, False),
    "spread_refreshes": (True, False),
    "maximize": (True, False),
}


def refuse_unsupported(*, decoupled_weight_decay: bool, **given: object) -> None:
    """Adam's arguments that have no meaning here or are not implemented."""
    advice = {
        "amsgrad": "a sign has no second moment to take the maximum of",
        "capturable": "the refresh schedule is kept on the host; leave the optimizer step out of CUDA graphs",
        "differentiable": "eigenbases are not differentiated through",
        "fused": "matrices of one shape are always stepped as one batch",
    }
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}={value} is given; SPlus does not support it: {advice[name]}. Leave it out.")
    if not decoupled_weight_decay:
        raise ValueError(
            "decoupled_weight_decay=False is given; SPlus does not support it: a sign would undo what a decay adds to "
            "the gradient. Leave it out."
        )


def make_plain(group: MutableMapping[str, Any]) -> None:
    """In place, options as Python's own values, which every loader admits; a learning rate may stay a tensor.

    A configuration's list is one value, a tuple of sections; numbers of other libraries become Python's.
    """
    for option, value in group.items():
        if option in ("split", "split_dim", "stacked"):
            group[option] = _plain(value)
        elif option not in ("params", "param_names"):
            group[option] = _plain_number(value)
    for option in ("precondition_frequency", "max_preconditioner_dim"):
        if isinstance(group[option], SupportsIndex):
            group[option] = operator.index(group[option])
    if group["whiten"] in (0, 1):
        group["whiten"] = bool(group["whiten"])


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_plain_number(entry) for entry in value)
    return _plain_number(value)


def _plain_number(value: Any) -> Any:
    """The Python number that a scalar of numpy or the like is; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and not isinstance(value, Tensor) else value


def check_group(group: Mapping[str, Any]) -> None:
    """Raise a ValueError for the first hyperparameter of a group that is out of its range or no number."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must have 1 element; lr of shape {tuple(lr.shape)} is given.")
    _require(_number(lr, "lr") >= 0, "lr", lr, "0 or more")
    betas = group["betas"]
    _require(isinstance(betas, Sequence) and len(betas) == 2, "betas", betas, "a pair (beta1, beta2)")
    for i, beta in enumerate(betas):
        _require(0 <= _number(beta, f"betas[{i}]") < 1, f"betas[{i}]", beta, "in [0, 1)")
    for name, required in (
        ("ema_decay", "in [0, 1)"),
        ("normalization_decay", "in [0, 1)"),
        ("eps", "in [0, 1), a fraction of a matrix's Frobenius norm"),
    ):
        _require(0 <= _number(group[name], name) < 1, name, group[name], required)
    for name in ("weight_decay", "elementwise_scale", "width_power"):
        _require(_number(group[name], name) >= 0, name, group[name], "0 or more")
    for name in ("precondition_frequency", "max_preconditioner_dim"):
        value = group[name]
        _require(isinstance(value, int) and value >= 1, name, value, "an integer of 1 or more")
    growth = group["refresh_growth"]
    if growth is not None:
        _require(_number(growth, "refresh_growth") > 1, "refresh_growth", growth, "above 1, or None for no early ones")
    for name, choices in _CHOICES.items():
        _require(group[name] in choices, name, group[name], "one of " + ", ".join(map(repr, choices)))
    per_parameter(group, "stacked")
    for value in per_parameter(group, "split"):
        sizes = value if isinstance(value, tuple) else () if value is None else (value,)
        _require(all(isinstance(size, int) for size in sizes), "split", value, "an integer, a tuple of them or None")
    for value in per_parameter(group, "split_dim"):
        _require(value in (0, 1), "split_dim", value, "0 (rows) or 1 (columns)")


def _require(holds: bool, name: str, value: object, required: str) -> None:
    if not holds:
        raise ValueError(f"Invalid {name}: {value!r} is given; it must be {required}.")


def _number(value: Any, name: str) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last for a complex tensor
        raise ValueError(f"Invalid {name}: {value!r} is given; it must be a number.") from None


def check_parameter(parameter: Tensor, name: str) -> None:
    """Raise for a parameter of a kind that SPlus cannot update."""
    if parameter.is_complex():
        raise ValueError(
            f"{name} is complex ({parameter.dtype}); SPlus updates real parameters. "
            "Hold it as a real one of shape (..., 2) and use torch.view_as_complex in the model."
        )
    if not parameter.is_floating_point():
        raise ValueError(f"{name} has dtype {parameter.dtype}; SPlus updates floating-point parameters.")
    if parameter.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values, of which the state would be made. Materialize and "
            "initialize the model before making the optimizer."
        )
    if getattr(parameter, "_fsdp_flattened", False):
        raise ValueError(
            f"{name} is a flat parameter of FullyShardedDataParallel or a part of one, with {parameter.numel()} "
            "entries; SPlus needs the shapes of matrices. Shard with torch.distributed.fsdp.fully_shard, or use "
            "DistributedDataParallel."
        )


def check_not_flattened(group: Mapping[str, Any], names: Collection[str], known: Collection[Tensor]) -> None:
    """Raise if one new vector has taken the place of a group's whitened parameters, called ``names``.

    That is how ZeRO of DeepSpeed, and master weights of other wrappers, take over an optimizer.
    """
    parameters = group["params"]
    if names and len(parameters) == 1 and parameters[0].ndim == 1 and parameters[0] not in known:
        raise RuntimeError(
            f"One flat vector of {parameters[0].numel()} entries has taken the place of {', '.join(names)}, as ZeRO of "
            "DeepSpeed does it; SPlus needs the shapes of matrices. Use DistributedDataParallel or fully_shard, or put "
            "vectors of your own into a group of their own with add_param_group."
        )


def check_not_replaced(parameter: Tensor, name: str) -> None:
    """Raise for a parameter whose place in the model one of ``fully_shard`` has taken, which gets its gradients."""
    if hasattr(parameter, "_fsdp_orig_uid"):
        raise RuntimeError(
            f"fully_shard has replaced {name} by a sharded parameter after the optimizer was made, which would train "
            "nothing. Make the optimizer after fully_shard."
        )


def check_unchanged(parameter: Tensor, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise for a parameter that was cast or moved after its state was made in ``dtype``'s precision on ``device``."""
    if parameter.dtype != dtype or parameter.device != device:
        raise RuntimeError(
            f"{name} is {parameter.dtype} on {parameter.device} now and was {dtype} on {device} when its state was "
            "made; cast or move the model before making the optimizer."
        )


def check_gradient(gradient: Tensor, name: str) -> None:
    """Raise for a gradient of a layout that SPlus cannot use."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"The gradient of {name} has the sparse layout {gradient.layout}; SPlus needs dense gradients. "
            "Build the embedding with sparse=False, or give these parameters to torch.optim.SparseAdam."
        )


def per_parameter(group: Mapping[str, Any], option: str) -> list[Any]:
    """A group option that may be one value for all parameters or a list with one for each, as a list.

    Raises:
        ValueError: a list of another length than the group's.
    """
    value, count = group[option], len(group["params"])
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{option} is a list of {len(value)} for a group of {count} parameters; "
            "give one entry for each parameter, or one value (sizes of sections as a tuple)."
        )
    return value


def parameter_name(group: Mapping[str, Any], index: int, position: int) -> str:
    """How messages call a parameter of group ``index``: its name if the group has names, else its place and shape."""
    if "param_names" in group:
        return f"parameter {group['param_names'][position]!r}"
    return f"parameter {position} of group {index}, shape {tuple(group['params'][position].shape)}"
