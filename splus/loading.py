"""Loading a state dict: everything is checked before anything is changed, then copied into the stacks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from splus.arguments import STRUCTURAL, check_group
from splus.books import GroupBooks, overwrite
from splus.precision import LOW_PRECISION

if TYPE_CHECKING:
    from splus.optimizer import SPlus

StateDict = dict[str, Any]


@torch.no_grad()
def load_optimizer_state(optimizer: "SPlus", state_dict: StateDict) -> None:
    """See :meth:`splus.SPlus.load_state_dict`."""
    state_dict = state_dict.copy()
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = before(optimizer, state_dict) or state_dict
    saved_groups = state_dict["param_groups"]
    _check_groups(optimizer.param_groups, saved_groups)
    training = all(group["training"] for group in saved_groups)
    saved: dict[Tensor, Mapping[str, Any]] = {}
    for group, books, saved_group in zip(optimizer.param_groups, optimizer._books, saved_groups):
        for position, key in _saved_keys(group, books, saved_group).items():
            parameter = books.parameters[position]
            if key not in state_dict["state"]:
                raise ValueError(
                    f"The loaded state dict has no state for {books.names[position]}. "
                    "Every parameter of SPlus has state; load a state dict of the same parameters."
                )
            saved[parameter] = state_dict["state"][key]
            _check_state(books.names[position], optimizer.state[parameter], saved[parameter], training)
    for parameter, state in saved.items():
        live = optimizer.state[parameter]
        if training and parameter.dtype not in LOW_PRECISION:
            # The parameter itself holds the weights; a copy was for another mode or dtype.
            live.pop("weights", None)
            state = {key: value for key, value in state.items() if key != "weights"}
        overwrite(live, state)
    for group, saved_group in zip(optimizer.param_groups, saved_groups):
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        group.update({key: value for key, value in saved_group.items() if key != "params"} | names)
        group["betas"] = tuple(group["betas"])
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def _check_groups(groups: list[StateDict], saved_groups: list[StateDict]) -> None:
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"The loaded state dict has {len(saved_groups)} parameter groups and this optimizer {len(groups)}; "
            "make the optimizer with the same groups, in the same order."
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups)):
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"Group {index} of the loaded state dict has {len(saved['params'])} parameters and this optimizer's "
                f"{len(group['params'])}; make the optimizer with the same parameters."
            )
        missing = sorted(set(group) - set(saved) - {"param_names", "name"})
        if missing:
            raise ValueError(
                f"Group {index} of the loaded state dict lacks {', '.join(missing)}; was it saved by another optimizer?"
            )
        for option in STRUCTURAL:
            if group[option] != saved[option]:
                raise ValueError(
                    f"Group {index} was saved with {option}={saved[option]!r} and this optimizer has "
                    f"{option}={group[option]!r}, which gives its state other shapes; make the optimizer with the same."
                )
        check_group(saved | {"params": group["params"]})


def _saved_keys(group: StateDict, books: GroupBooks, saved_group: StateDict) -> dict[int, Any]:
    """For each parameter's position, the key of its state in the file: by name where both have names."""
    keys = saved_group["params"]
    if "param_names" not in group or "param_names" not in saved_group:
        return {position: keys[position] for position in books.parameters}
    by_name = dict(zip(saved_group["param_names"], keys))
    absent = [name for name in group["param_names"] if name not in by_name]
    if absent:
        raise ValueError(
            f"The loaded state dict has no parameters named {', '.join(map(repr, absent))} in this group; it has "
            f"{', '.join(map(repr, by_name))}. Load a state dict of the same model, or make both without names."
        )
    return {position: by_name[group["param_names"][position]] for position in books.parameters}


def _check_state(name: str, live: StateDict, saved: Mapping[str, Any], training: bool) -> None:
    """The saved state of one parameter has the same entries and shapes as the live one, in the mode it was saved in."""
    # In train mode the weights are in the model (a low-precision one's are taken from it); in eval mode only here.
    expected = set(live) - {"weights"} if training else set(live) | {"weights"}
    wrong = (expected ^ set(saved)) - ({"weights"} if training else set())
    if wrong:
        raise ValueError(
            f"The state of {name} in the loaded state dict has the entries {sorted(saved)}; {sorted(expected)} are "
            "needed. Load a state dict of the same model, saved by SPlus."
        )
    for key, value in saved.items():
        if isinstance(value, Tensor) and key in live and value.shape != live[key].shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the loaded state dict and "
                f"{tuple(live[key].shape)} here; load a state dict of the same model."
            )
