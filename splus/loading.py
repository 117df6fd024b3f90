"""Loading a state dict: everything is checked before anything is changed, then copied into the stacks."""

import math
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from splus.arguments import STRUCTURAL, check_group
from splus.books import overwrite
from splus.owned import can_put
from splus.precision import LOW_PRECISION

if TYPE_CHECKING:
    from splus.optimizer import SPlus

Group = dict[str, Any]


@torch.no_grad()
def load_optimizer_state(optimizer: "SPlus", state_dict: dict[str, Any]) -> None:
    """See :meth:`splus.SPlus.load_state_dict`."""
    state_dict = state_dict.copy()
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = before(optimizer, state_dict) or state_dict
    for key in ("param_groups", "state"):
        if key not in state_dict:
            raise ValueError(f"The loaded dict has no {key!r}: it is not what state_dict() of an optimizer returns.")
    saved_groups = _checked_groups(optimizer, state_dict["param_groups"])
    training = _mode(saved_groups)
    saved_state: dict[Tensor, Mapping[str, Any]] = {}
    for books, saved_group in zip(optimizer._books, saved_groups):
        filled = _has_qualified_names(saved_group)
        for position, parameter in books.parameters.items():
            state = state_dict["state"].get(saved_group["params"][position])
            if state is not None:
                # torch.distributed.checkpoint puts an empty dict for what it did not find.
                state = {key: value for key, value in state.items() if not (isinstance(value, dict) and not value)}
                if filled and not training and not parameter.requires_grad and not state.get("step"):
                    # It has put in the weights that the optimizer at hand began with, for what the file has not.
                    state.pop("weights", None)
                _check_state(books.names[position], parameter, optimizer.state[parameter], state, training)
                saved_state[parameter] = state
            elif parameter.requires_grad:  # torch.distributed.checkpoint leaves out what is frozen
                raise ValueError(
                    f"The loaded state dict has no state for {books.names[position]}. "
                    "Every parameter of SPlus has state; load a state dict of the same parameters."
                )
    for books in optimizer._books:
        for parameter in books.parameters.values():
            _load_state(parameter, optimizer.state[parameter], saved_state.get(parameter, {}), training)
    for group, saved_group in zip(optimizer.param_groups, saved_groups):
        kept = {"params", "matmul_dtype", *STRUCTURAL} | ({"param_names"} & set(group))
        group.update({key: deepcopy(value) for key, value in saved_group.items() if key not in kept})
        group["betas"] = tuple(group["betas"])
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _checked_groups(optimizer: "SPlus", saved_groups: list[Group]) -> list[Group]:
    """The saved groups with their parameters in the order of the optimizer's, by name where both have names."""
    groups = optimizer.param_groups
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"The loaded state dict has {len(saved_groups)} parameter groups and this optimizer {len(groups)}; "
            "make the optimizer with the same groups, in the same order."
        )
    checked = []
    for index, (group, saved) in enumerate(zip(groups, saved_groups)):
        if "params" not in saved:
            raise ValueError(f"Group {index} of the loaded dict has no 'params': it is not what state_dict() returns.")
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"Group {index} of the loaded state dict has {len(saved['params'])} parameters and this optimizer's "
                f"{len(group['params'])}; make the optimizer with the same parameters."
            )
        saved = _with_options(index, group, saved, saved_groups)
        missing = sorted(set(optimizer.defaults) - set(saved) - {"differentiable"})  # torch adds it to unpickled ones
        if missing:
            raise ValueError(
                f"Group {index} of the loaded state dict lacks {', '.join(missing)}; was it saved by another optimizer "
                "or another version? Load what state_dict() of this version's SPlus returned."
            )
        checked.append(_reordered(group, saved))
        _check_structure(index, group, checked[-1])
        check_group(checked[-1])
    return checked


def _check_structure(index: int, group: Group, saved: Group) -> None:
    for option in STRUCTURAL:
        if group[option] != saved[option]:
            raise ValueError(
                f"Group {index} was saved with {option}={saved[option]!r} and this optimizer has "
                f"{option}={group[option]!r}, which gives its state other shapes; make the optimizer with the same."
            )


def _with_options(index: int, group: Group, saved: Group, saved_groups: Sequence[Group]) -> Group:
    """A saved group, with the options of ``group`` if torch.distributed.checkpoint left it none, in the saved mode.

    That happens to a group whose parameters went to the file in a group with others, unless the file is flat.
    """
    modes = [other["training"] for other in saved_groups if "training" in other]
    if set(saved) != {"params"} or not _has_qualified_names(saved) or not modes:
        return saved
    warnings.warn(
        f"The loaded state dict has no options for group {index}, whose parameters were saved in a group with others; "
        "it keeps its own. Save and load with flatten_optimizer_state_dict=True to have those of the file.",
        stacklevel=2,
    )
    return {**{key: value for key, value in group.items() if key != "param_names"}, **saved, "training": modes[0]}


def _has_qualified_names(saved: Group) -> bool:
    """Whether torch.distributed.checkpoint has put this group's parameters, by name, where those at hand are."""
    return all(isinstance(key, str) for key in saved["params"])


def _reordered(group: Group, saved: Group) -> Group:
    """A saved group with its parameters, and the options that list one value for each, in the order of ``group``."""
    names, saved_names = group.get("param_names"), saved.get("param_names")
    matched = _has_qualified_names(saved)
    if matched and (names is None or saved_names is None or not set(names) <= set(saved_names)):
        return {key: value for key, value in saved.items() if key != "param_names"}
    if names is None or saved_names is None:
        return saved
    if not matched and len(saved_names) != len(saved["params"]):
        raise ValueError(
            f"A group of the loaded state dict has {len(saved['params'])} parameters and {len(saved_names)} "
            "names: it was saved by an optimizer with other groups. Make this one with the same groups."
        )
    places = {name: place for place, name in enumerate(saved_names)}
    absent = [name for name in names if name not in places]
    if absent:
        raise ValueError(
            f"The loaded state dict has no parameters named {', '.join(map(repr, absent))} in this group; it has "
            f"{', '.join(map(repr, places))}. Load a state dict of the same model, or make both without names."
        )
    order = [places[name] for name in names]
    listed = {option for option in STRUCTURAL if isinstance(saved[option], list)} | (set() if matched else {"params"})
    return {key: [value[place] for place in order] if key in listed else value for key, value in saved.items()}


def _mode(saved_groups: Sequence[Group]) -> bool:
    """Whether the saved groups are in train mode, all of them."""
    modes = [bool(group["training"]) for group in saved_groups]
    if len(set(modes)) > 1:
        raise ValueError(
            f"The groups of the loaded state dict have training={modes}: all of them are in one mode in what "
            "state_dict() returns. Load groups that were saved together."
        )
    return modes[0]


def _check_state(name: str, parameter: Tensor, live: Mapping[str, Any], saved: Mapping[str, Any], train: bool) -> None:
    """The saved state of one parameter has the same entries and shapes as the live one, in the mode it was saved in."""
    # In train mode the weights are in the model (a low-precision one's are taken from it); in eval mode only here.
    expected = set(live) - {"weights"}
    if expected != set(saved) - {"weights"}:
        raise ValueError(
            f"The state of {name} in the loaded state dict has the entries {sorted(saved)}; {sorted(expected)} are "
            "needed. Load a state dict of the same model, saved by SPlus."
        )
    if "weights" not in saved and not _has_weights_in_model(parameter, saved, train):
        raise ValueError(
            f"The loaded state dict is in eval mode and has no weights of {name}, the ones being trained. A flat one "
            "of torch.distributed.checkpoint is cut to what the optimizer at hand has: call its eval() before loading."
        )
    for key, value in saved.items():
        if key in ("step", "peak"):
            _check_number(name, key, value)
            continue
        shape = live["average" if key == "weights" else key].shape
        if not isinstance(value, Tensor) or value.shape != shape:
            given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{key} of {name} is {given} in the loaded state dict and has shape {tuple(shape)} here; "
                "load a state dict of the same model."
            )
        if not can_put(live["average" if key == "weights" else key], value):
            raise ValueError(
                f"{key} of {name} in the loaded state dict is spread over other ranks than here; save and load with "
                "torch.distributed.checkpoint, or load what full_state_dict() returns."
            )


def _check_number(name: str, key: str, value: Any) -> None:
    try:
        right = 0 <= float(value) < math.inf and (key == "peak" or int(value) == float(value))
    except (TypeError, ValueError):
        right = False
    if not right:
        meaning = {"step": "it counts updates: 0, 1, 2, …", "peak": "it is the size of gradients, 0 or more"}[key]
        raise ValueError(f"{key} of {name} is {value!r} in the loaded state dict; {meaning}.")


def _has_weights_in_model(parameter: Tensor, saved: Mapping[str, Any], training: bool) -> bool:
    """Whether the weights being trained are what the model holds, and not in the saved state ({} for none).

    In eval mode they are those of a frozen parameter, which torch.distributed.checkpoint leaves out.
    """
    return training or (not parameter.requires_grad and "weights" not in saved)


def _load_state(parameter: Tensor, live: dict[str, Any], saved: Mapping[str, Any], training: bool) -> None:
    low_precision = parameter.dtype in LOW_PRECISION
    if _has_weights_in_model(parameter, saved, training) and not (training and low_precision):
        # A copy was for another mode or dtype.
        live.pop("weights", None)
        saved = {key: value for key, value in saved.items() if key != "weights"}
    elif "weights" not in live:
        live["weights"] = parameter.detach().to(live["average"].dtype, copy=True)
    overwrite(live, saved)
