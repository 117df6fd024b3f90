"""Files that are whole or absent, whenever the process dies: the old content or the new, never half of it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch


def save(state: dict[str, Any], path: Path) -> None:
    with _replacing(path) as file:
        torch.save(state, file)


def write_text(text: str, path: Path) -> None:
    with _replacing(path) as file:
        file.write(text.encode())


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name that is forced to the disk and then takes the place of ``path``."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":  # elsewhere a directory cannot be opened
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def load(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint, or None if there is none.

    Raises:
        ValueError: the file is not a whole checkpoint.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL is torch's answer to a cut archive
            raise
        reason = (str(error) or "it is empty").splitlines()[0]
        raise ValueError(
            f"{path} is no whole checkpoint ({reason}); delete it to start this run anew, or put a copy in its place"
        ) from None
    return state


def random_states() -> dict[str, Any]:
    """The global generators of torch, for optimizers that draw from them; the harness itself does not."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state_all(states["cuda"])
