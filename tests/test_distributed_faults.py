"""What goes wrong on one rank: all of them raise or all of them go on, and none waits for ever."""

import multiprocessing
import os
import re
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_distributed import MODES, Run, on_rank, shared_options
from test_distributed_engines import OPTIONS, line, loss_of, network, optimizer_of, sharded, share
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from splus import SPlus
from splus.exchange import Exchange

# Options, parameters and their order


def parameters_of(*sides: int) -> dict[str, nn.Parameter]:
    return {f"{i}": nn.Parameter(torch.ones(side, side)) for i, side in enumerate(sides)}


def message_of_a_step(rank: int, sides: tuple[int, ...], names: str, options: dict[str, Any], lr: float) -> str:
    """Where the last rank has these parameters and options, and this learning rate from the second step on."""
    odd = rank == dist.get_world_size() - 1
    parameters = parameters_of(*sides if odd else (4, 4, 3))
    order = names if odd else "012"
    named = [(name, parameters[str(i)]) for i, name in enumerate(order[: len(parameters)])]
    optimizer = SPlus(named, **OPTIONS | (options if odd else {}), process_group=dist.group.WORLD)
    for step in range(2):
        if step and odd:
            optimizer.param_groups[0]["lr"] = lr
        for parameter in parameters.values():
            parameter.grad = torch.eye(len(parameter))
        before = [parameter.detach().clone() for parameter in parameters.values()]
        try:
            optimizer.step()
        except RuntimeError as error:
            assert all(map(torch.equal, before, parameters.values()))
            return str(error)
    return ""


OTHER_PLAN = "Ranks [2] have made SPlus with other parameters or options than rank 0"


@pytest.mark.parametrize(
    ("sides", "names", "options", "lr", "message"),
    [
        ((4, 4, 3), "012", {}, 0.3, ""),
        ((4, 5, 3), "012", {}, 0.3, OTHER_PLAN),
        ((4, 4), "012", {}, 0.3, OTHER_PLAN),
        ((4, 4, 3), "102", {}, 0.3, OTHER_PLAN),
        ((4, 4, 3), "012", {"sides": "shorter"}, 0.3, OTHER_PLAN),
        ((4, 4, 3), "012", {"betas": (0.8, 0.9)}, 0.3, "betas of group 0: (0.9, 0.97), (0.9, 0.97), (0.8, 0.9)"),
        ((4, 4, 3), "012", {}, 0.2, "lr of group 0: 0.3, 0.3, 0.2. Set the same on every rank"),
    ],
)
def test_ranks_that_are_not_alike_all_raise(
    sides: tuple[int, ...], names: str, options: dict[str, Any], lr: float, message: str
) -> None:
    """Parameters, their order, options at the start, a learning rate later on; nothing has moved then."""
    found = on_ranks(3, message_of_a_step, sides, names, options, lr)
    assert len(set(found)) == 1
    assert message in found[0]
    assert bool(message) == bool(found[0])


# Gradients


def faulty_steps(rank: int, kind: str, spoil: Callable[[nn.Parameter], None], steps: int) -> tuple[Any, ...]:
    """What is said and raised, and the steps of the parameter that rank 1 spoils and of another."""
    model = network()
    if kind == "sharded":
        sharded(model, line(2))
    optimizer = optimizer_of(model, process_group=None if kind == "sharded" else dist.group.WORLD)
    spoiled, said, raised = model.optional.weight, [], ""
    for step in range(steps):
        if not raised:
            loss_of(model, *share(step)).backward()
            if rank == 1:
                spoil(spoiled)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    optimizer.step()
                except RuntimeError as error:
                    raised = str(error)
            said += [str(warning.message) for warning in caught if "splus" in warning.filename]
            optimizer.zero_grad()
    return said, raised, optimizer.state[spoiled]["step"], optimizer.state[model.head.weight]["step"]


def not_a_number(parameter: nn.Parameter) -> None:
    local = getattr(parameter.grad, "_local_tensor", parameter.grad)
    local[0, 0] = torch.nan


def no_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


def to_sparse(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.to_sparse()


def not_reduced(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad *= 1.01


@pytest.mark.parametrize(
    ("kind", "spoil", "fault"),
    [
        ("replicated", not_a_number, "not finite"),
        ("sharded", not_a_number, "not finite"),
        ("replicated", no_gradient, "some ranks have and others lack"),
    ],
)
def test_gradient_that_one_rank_cannot_use_is_skipped_by_all(
    kind: str, spoil: Callable[[nn.Parameter], None], fault: str
) -> None:
    """Said once on every rank, and an error on every rank after ten in a row."""
    for said, raised, spoiled, other in on_ranks(2, faulty_steps, kind, spoil, 11):
        assert len(said) == 1
        assert re.search(f"{fault}.*optional.weight", said[0])
        assert re.search(f"{fault}.*10 times in a row", raised)
        assert (spoiled, other) == (0, 9)


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (to_sparse, ["Another rank has raised before this step", "sparse layout"]),
        (not_reduced, ["have different gradients of it. Average gradients over these ranks"] * 2),
    ],
)
def test_gradient_of_one_rank_that_stops_all(spoil: Callable[[nn.Parameter], None], messages: list[str]) -> None:
    for (said, raised, *steps), message in zip(on_ranks(2, faulty_steps, "replicated", spoil, 1), messages):
        assert said == []
        assert message in raised
        assert steps == [0, 0]


# Optimizers that are made too early


def too_early(rank: int) -> str:
    model = network()
    optimizer = optimizer_of(model)
    sharded(model, line(2))
    loss_of(model, *share(0)).backward()
    with pytest.raises(RuntimeError, match="Make the optimizer after fully_shard") as raised:
        optimizer.step()
    return str(raised.value)


def test_optimizer_from_before_fully_shard_says_so() -> None:
    """Its parameters are in no module any more, and would never get a gradient."""
    for message in on_ranks(2, too_early):
        assert "fully_shard has replaced parameter 'embedding.weight'" in message


# Matrices of any number on any number of ranks


def counts(rank: int, ranks: int) -> None:
    for count in (0, 1, 2, 3, 4, 5, 8):
        shapes = [(2 + i % 5, 6 - i % 4) for i in range(count)]
        found = []
        for group in (None, dist.group.WORLD):
            torch.manual_seed(count)
            parameters = [nn.Parameter(torch.randn(shape)) for shape in ((3,), *shapes)]
            optimizer = SPlus(parameters, **OPTIONS, process_group=group)
            for _ in range(10):
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape)
                optimizer.step()
            refreshes = torch.tensor(sum(of_group["refreshes"] for of_group in optimizer.metrics()))
            if group is not None:
                dist.all_reduce(refreshes)
            found.append((parameters, int(refreshes)))
        (alone, times), (shared, times_shared) = found
        assert times == times_shared
        for one, other in zip(alone, shared):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_matrices_is_updated_and_refreshed_once(ranks: int) -> None:
    """Also fewer than ranks, none, and as many or twice as many."""
    on_ranks(ranks, counts, ranks)


def small_shards(rank: int) -> None:
    model = nn.Linear(16, 8)
    before = model.weight.detach().clone()
    fully_shard(model, mesh=line(4))
    optimizer = SPlus(model.named_parameters(), lr=0.1, step_norm="frobenius", weight_decay=0.0)
    model(torch.randn(32, 16)).square().sum().backward()
    optimizer.step()
    moved = (model.weight.full_tensor() - before).norm()
    torch.testing.assert_close(moved, torch.tensor(0.1 * 2 / (8 + 16) * (8 * 16) ** 0.5))


def test_routes_and_steps_go_by_the_whole_shape() -> None:
    """Two rows of a shard are an 8×16 matrix with its step size."""
    on_ranks(4, small_shards)


# Memory that nobody has written to


def poisoned(rank: int, mode: str, ranks: int) -> dict[str, Tensor]:
    original = torch.Tensor.new_empty

    def not_a_number(self: Tensor, *sizes: Any, **options: Any) -> Tensor:
        return original(self, *sizes, **options).fill_(torch.nan)

    with patch.object(torch.Tensor, "new_empty", not_a_number):
        return on_rank(rank, mode, ranks)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_read_that_did_not_arrive(mode: str) -> None:
    """Buffers that are full of NaN at first change no bit, on ranks that do not divide what they share."""
    ranks = 4 if mode == "hsdp" else 3
    for clean, after in zip(on_ranks(ranks, on_rank, mode, ranks), on_ranks(ranks, poisoned, mode, ranks)):
        for name, value in clean.items():
            assert torch.equal(value, after[name]), name


# Ranks that die, in processes of their own


def doomed(rank: int, how: str, store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=3), world_size=2, rank=rank)
    run = Run(MODES["ddp"](rank, 2), **shared_options("ddp"))
    run.step(0)

    def fail(*_: Any) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("out of luck")

    try:
        with patch.object(Exchange, "send_updates", fail) if rank == 1 else nullcontext():
            run.step(1)
        pipe.send("nothing")
    except Exception as error:
        pipe.send(repr(error))
    pipe.recv()  # stays alive for as long as the test wants


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_others_raise_when_a_rank_is_lost_within_a_step(how: str, tmp_path: Path) -> None:
    """At once if its process is gone, else within the timeout of the group: three seconds here."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=doomed, args=(rank, how, tmp_path / "store", theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        assert pipes[0].poll(60), "a rank waits for one that is lost"
        assert "RuntimeError" in pipes[0].recv()
        if how == "raises":
            assert "out of luck" in pipes[1].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
