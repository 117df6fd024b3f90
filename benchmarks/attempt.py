"""One attempt at a cell, wherever it runs: the training, its log, and that nobody else is at it."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from benchmarks.cells import ORIGIN, present_origin

Run = Callable[[DictConfig, Path], dict[str, Any]]


class DirectoryInUse(RuntimeError):
    """Another process works in the directory."""


def train_cell(config: DictConfig, directory: Path) -> dict[str, Any]:
    """One run of the training harness, from the checkpoint in the directory if there is one."""
    from train.loop import run

    result: dict[str, Any] = run(config, directory, progress=False)
    return result


def attempt(run: Run, config: Any, directory: Path) -> tuple[dict[str, Any] | None, str]:
    """The result of ``run``, or None and a traceback; what it prints goes to the directory's log.txt."""
    _print_to(directory / "log.txt")
    try:
        with only_user_of(directory):
            if not (directory / ORIGIN).exists():
                (directory / ORIGIN).write_text(json.dumps(present_origin()))
            return run(OmegaConf.create(config), directory), ""
    except Exception:
        return None, traceback.format_exc()


@contextmanager
def only_user_of(directory: Path) -> Iterator[None]:
    """Holds a lock on ``directory``: two processes in one would write over each other's files."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(
                f"{directory} is in use by another running sweep; wait for it to end, or give another output directory"
            ) from None
        yield


def _print_to(path: Path) -> None:
    """Sends what this process prints, also from C, to a file: the terminal belongs to the progress display."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
