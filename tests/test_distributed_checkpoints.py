"""Checkpoints that move between one process and ranks that share the work, at other numbers and in other modes."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from test_distributed import FP32, MODES, Run, shared_options, whole
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from splus.owned import OwnedTensor
from splus.teams import local

OPTIONS = {"nested": StateDictOptions(), "flat": StateDictOptions(flatten_optimizer_state_dict=True)}
PLACES = [("alone", 1), ("ddp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tensor_parallel", 3)]
BEFORE, AFTER = 7, 9  # within a period between refreshes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_in(mode: str, rank: int, ranks: int) -> Run:
    if mode == "alone":
        return Run(lambda name, value: value.clone())
    return Run(MODES[mode](rank, ranks), **shared_options(mode))


def states(run: Run, form: str) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=OPTIONS[form]),
    }


def save(rank: int, mode: str, ranks: int, form: str, directory: Path) -> None:
    run = run_in(mode, rank, ranks)
    for number in range(BEFORE):
        run.step(number)
    run.optimizer.train(form == "nested")
    dcp.save(states(run, form), checkpoint_id=directory, no_dist=mode == "alone")


def resume(rank: int, mode: str, ranks: int, form: str, directory: Path) -> dict[str, Tensor]:
    run = run_in(mode, rank, ranks)
    run.optimizer.train(form == "nested")
    read = states(run, form)
    dcp.load(read, checkpoint_id=directory, no_dist=mode == "alone")
    set_model_state_dict(run.model, read["model"])
    set_optimizer_state_dict(run.model, run.optimizer, read["optimizer"], options=OPTIONS[form])
    run.optimizer.train()
    for number in range(BEFORE, BEFORE + AFTER):
        run.step(number)
    return run.result()


def everywhere(function: Any, mode: str, ranks: int, *arguments: Any) -> list[Any]:
    return [function(0, mode, 1, *arguments)] if mode == "alone" else on_ranks(ranks, function, mode, ranks, *arguments)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    run = run_in("alone", 0, 1)
    for number in range(BEFORE + AFTER):
        run.step(number)
    return run.result()


@pytest.mark.parametrize(
    ("mode", "ranks", "form", "others"),
    [
        *((*place, "nested", PLACES) for place in PLACES),
        *((*place, "flat", PLACES[::3]) for place in PLACES[::2]),
    ],
)
def test_goes_on_anywhere_as_if_uninterrupted(
    mode: str,
    ranks: int,
    form: str,
    others: list[tuple[str, int]],
    uninterrupted: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    """Saved in one place with torch.distributed.checkpoint, nested in train mode or flat in eval mode, and loaded."""
    everywhere(save, mode, ranks, form, tmp_path)
    for other, count in others:
        for found in everywhere(resume, other, count, form, tmp_path):
            for name, value in found.items():
                torch.testing.assert_close(value, uninterrupted[name], **FP32)


# Whole state dicts


def whole_state(rank: int, mode: str, ranks: int) -> dict[str, Any]:
    run = run_in(mode, rank, ranks)
    for number in range(BEFORE):
        run.step(number)
    state = run.optimizer.full_state_dict()
    state["model"] = {name: whole(value) for name, value in run.model.state_dict().items()}
    return state


def resume_whole(rank: int, mode: str, ranks: int, state: dict[str, Any]) -> dict[str, Tensor]:
    run = run_in(mode, rank, ranks)
    with torch.no_grad():
        for name, parameter in run.parameters.items():
            parameter.copy_(run.make(name, state["model"][name]))
    run.optimizer.load_state_dict(state)
    for number in range(BEFORE, BEFORE + AFTER):
        run.step(number)
    return run.result()


@pytest.mark.parametrize(("mode", "ranks"), PLACES)
def test_whole_state_dicts(mode: str, ranks: int, uninterrupted: dict[str, Tensor]) -> None:
    """The same on every rank as that of one process, and loads in one process and on ranks."""
    alone = whole_state(0, "alone", 1)
    for state in everywhere(whole_state, mode, ranks):
        assert state["param_groups"] == alone["param_groups"]
        torch.testing.assert_close(state["state"], alone["state"], **FP32)
        assert all(type(value) in (int, float, Tensor) for of in state["state"].values() for value in of.values())
    for other, count in (("alone", 1), (mode, ranks)):
        for found in everywhere(resume_whole, other, count, state):
            for name, value in found.items():
                torch.testing.assert_close(value, uninterrupted[name], **FP32)


def asked(rank: int, mode: str, ranks: int) -> None:
    run = run_in(mode, rank, ranks)
    for number in range(BEFORE):
        run.step(number)
        before = copy.deepcopy(run.optimizer.state_dict())
        for form in OPTIONS:
            states(run, form)
        run.optimizer.full_state_dict()
        after = run.optimizer.state_dict()
        assert before["param_groups"] == after["param_groups"]
        for i, of in before["state"].items():
            assert of.keys() == after["state"][i].keys()
            for key, value in of.items():
                assert torch.equal(held(value), held(after["state"][i][key])), key


def held(value: Any) -> Tensor:
    """What this rank has of an entry of the state."""
    if isinstance(value, OwnedTensor):
        return value.parts
    return local(value) if isinstance(value, Tensor) else torch.tensor(value)


@pytest.mark.parametrize(("mode", "ranks"), PLACES[1::2])
def test_asking_for_a_state_dict_changes_nothing(mode: str, ranks: int) -> None:
    on_ranks(ranks, asked, mode, ranks)


def keys(rank: int, mode: str, ranks: int) -> list[list[str]]:
    run = run_in(mode, rank, ranks)
    run.step(0, without=("tall",))
    return [list(of) for of in run.optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize(("mode", "ranks"), PLACES[1:])
def test_every_rank_has_the_entries_of_one_process(mode: str, ranks: int) -> None:
    """Also for what it does not own, and for parameters without a gradient."""
    alone = keys(0, "alone", 1)
    assert all(found == alone for found in on_ranks(ranks, keys, mode, ranks))


def owned_entries(rank: int, mode: str, ranks: int) -> int:
    run = run_in(mode, rank, ranks)
    return sum(
        value.parts.numel()
        for of in run.optimizer.state_dict()["state"].values()
        for value in of.values()
        if isinstance(value, OwnedTensor)
    )


@pytest.mark.parametrize(("mode", "ranks"), PLACES[1:])
def test_state_of_matrices_exists_once(mode: str, ranks: int) -> None:
    run = run_in("alone", 0, 1)
    whitened = [of for of in run.optimizer.state_dict()["state"].values() if "peak" in of]
    entries = sum(
        value.numel() for of in whitened for key, value in of.items() if isinstance(value, Tensor) and key != "average"
    )
    assert sum(on_ranks(ranks, owned_entries, mode, ranks)) == entries


# What is refused


def refused(rank: int, ranks: int) -> None:
    run = run_in("ddp", rank, ranks)
    with pytest.raises(RuntimeError, match="would lose those of all others in a file"):
        torch.save(run.optimizer.state_dict(), io.BytesIO())
    with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
        copy.deepcopy(run.optimizer)
    value = run.optimizer.state_dict()["state"][0]["factor_left"]
    with pytest.raises(RuntimeError, match="parts are on different ranks"):
        value + 1
    alone = run_in("alone", 0, 1).optimizer
    with pytest.raises(ValueError, match="spread over other ranks than here"):
        alone.load_state_dict(run.optimizer.state_dict())


def test_state_of_one_rank_alone_is_refused() -> None:
    on_ranks(2, refused, 2)
