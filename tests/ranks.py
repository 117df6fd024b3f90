"""Runs a function on several ranks of a gloo group, in processes that live as long as the tests do."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from coverage import Coverage

MOST = 4
PRELOADED = ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")
TIMEOUT = timedelta(seconds=60)
_workers: list[tuple[Any, Connection]] = []


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each of ``ranks`` processes of one group.

    The function must be importable. If it raises on any rank, the first traceback is raised here.
    """
    if not _workers:
        _start()
    with tempfile.TemporaryDirectory() as directory:
        for rank, (_, pipe) in enumerate(_workers[:ranks]):
            pipe.send((function, arguments, rank, ranks, Path(directory) / "store"))
        answers = [pipe.recv() for _, pipe in _workers[:ranks]]
    failures = [answer for fine, answer in answers if not fine]
    if failures:
        stop()  # one that could not join the group is out of step with the others ever after
        raise AssertionError("\n".join(failures))
    return [answer for _, answer in answers]


def _start() -> None:
    context = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    context.set_forkserver_preload(list(PRELOADED))  # imported once for all of them
    for _ in range(MOST):
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, _measured()), daemon=True)
        process.start()
        _workers.append((process, mine))


def stop() -> None:
    """Let the processes end by themselves, so that what they have covered is counted."""
    for _, pipe in _workers:
        pipe.send(None)
    for process, _ in _workers:
        process.join(timeout=10)
        process.kill()
    _workers.clear()


def _measured() -> str | None:
    """Where this process's coverage goes, if that is measured."""
    current = Coverage.current()
    return None if current is None else str(current.get_option("run:data_file"))


def _serve(pipe: Connection, data_file: str | None) -> None:
    torch.set_num_threads(1)
    coverage = None if data_file is None else Coverage(data_file, data_suffix=True)
    with nullcontext() if coverage is None else coverage.collect():
        _answer(pipe)
    if coverage is not None:
        coverage.save()


def _answer(pipe: Connection) -> None:
    while (task := pipe.recv()) is not None:
        function, arguments, rank, ranks, store = task
        try:
            dist.init_process_group("gloo", f"file://{store}", TIMEOUT, world_size=ranks, rank=rank)
            dist.barrier()  # a function that sends nothing must not end while another rank still connects
            answer = (True, function(rank, *arguments))
        except Exception:
            answer = (False, f"rank {rank} of {ranks}:\n{traceback.format_exc()}")
        if dist.is_initialized():
            dist.destroy_process_group()  # which needs the store: it is deleted after the answers
        pipe.send(answer)
