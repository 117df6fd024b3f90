"""Files that are whole or absent, whenever the process dies: the old content or the new, never half of it."""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from train.config import run_key
from train.parallel import Ranks

NAME, UNFINISHED = "checkpoint-", ".new"


def write_text(text: str, path: Path) -> None:
    temporary = path.with_name(path.name + UNFINISHED)
    with open(temporary, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    if os.name == "posix":  # elsewhere a directory cannot be opened
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def newest(directory: Path) -> Path | None:
    """The folder ``checkpoint-<step>`` of the last step that one was written at, or None if there is none."""
    folders = [path for path in directory.glob(NAME + "*") if path.suffix != UNFINISHED]
    return max(folders, key=lambda path: int(path.name.removeprefix(NAME)), default=None)


def save(state: dict[str, Any], directory: Path, step: int, ranks: Ranks) -> None:
    """Write ``checkpoint-<step>`` and remove the one before; on all ranks, each of which writes what it holds.

    It is written under another name, forced to the disk and then renamed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as write

    path = directory / f"{NAME}{step}"
    unfinished = path.with_name(path.name + UNFINISHED)
    if ranks.on_first(is_needed, path):
        try:
            with without_warning():
                write(state, checkpoint_id=unfinished, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            raise first_failure(error) from None
        ranks.on_first(put_in_place, unfinished, path)


def is_needed(path: Path) -> bool:
    """Whether no checkpoint of this step is there; what others have left unfinished is removed."""
    for unfinished in path.parent.glob(f"{NAME}*{UNFINISHED}"):
        shutil.rmtree(unfinished)
    return not path.exists()


def put_in_place(unfinished: Path, path: Path) -> None:
    sync_directory(unfinished)
    os.rename(unfinished, path)
    sync_directory(path.parent)
    remove(path.parent, but=path)


def remove(directory: Path, but: Path | None = None) -> None:
    for path in directory.glob(NAME + "*"):
        if path != but:
            shutil.rmtree(path)


def load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """``state`` with what the checkpoint has in the place of its values; on all ranks, whatever ranks wrote it.

    Tensors are filled in place, as far as this rank holds them.

    Raises:
        ValueError: the folder is not a whole checkpoint of such a state.
    """
    state = dict(state)
    read(state, path)
    if left := without_place(state, path):
        raise ValueError(
            f"{path} has {left[0]} and {len(left) - 1} more values that this run, not yet trained, has no place for; "
            "an optimizer can be resumed whose state is there from its first step on (train/baselines.py mends some)"
        )
    return state


def read(state: dict[str, Any], path: Path) -> None:
    """Fill ``state``, whatever else the checkpoint has."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with without_warning():
            load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        failure = first_failure(error)
        if isinstance(failure, OSError) and not isinstance(failure, FileNotFoundError):
            raise failure from None
        reason = (str(failure) or "a file is empty").splitlines()[0]
        raise ValueError(
            f"{path} is no whole checkpoint ({reason}); delete it to start this run anew, or put a copy in its place"
        ) from None


def load_weights(model: nn.Module, directory: Path, key: str | None) -> None:
    """Give a model the weights of the run in ``directory``, on every rank by itself.

    Raises:
        ValueError: the run has another key than this, its checkpoint is gone or it is of another model.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    found = run_key(directory)
    if key is not None and found != key:
        raise ValueError(f"start.key={key} given, but {directory} holds run {found}; give its directory, or no key")
    path = newest(directory)
    if path is None:
        raise ValueError(f"start.directory={directory} holds no checkpoint; train it with keep_checkpoint=true")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    there = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, weight in weights.items():
        size = getattr(there.get(f"model.{name}"), "size", None)
        if size != weight.shape:
            raise ValueError(
                f"start.directory={directory} has {name} of shape {size and tuple(size)}, and this model has "
                f"{tuple(weight.shape)}; start from a run of the same model"
            )
    read({"model": weights}, path)


def without_place(state: dict[str, Any], path: Path) -> list[str]:
    """Names of what the checkpoint has and ``state`` has not, on any rank; torch would leave it out in silence."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    names = [set(flatten_state_dict(state)[0])]
    if dist.is_initialized():
        names *= dist.get_world_size()
        dist.all_gather_object(names, names[0])
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    return sorted(saved.keys() - set().union(*names))


@contextmanager
def without_warning() -> Iterator[None]:
    """Of torch about one process, also where it is told that there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def first_failure(error: Any) -> BaseException:
    """Of the exceptions that torch.distributed.checkpoint has collected from the ranks."""
    failure: BaseException = error.failures[min(error.failures)][0]
    return failure


def random_states() -> dict[str, str]:
    """Torch's generators of the CPU and this process's device, for optimizers that draw; the harness does not."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: bytes(state.tolist()).hex() for device, state in states.items()}


def set_random_states(states: dict[str, str]) -> None:
    """Put them in the states of another process; a device that it did not have keeps its own."""
    tensors = {device: torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8) for device, state in states.items()}
    torch.set_rng_state(tensors["cpu"])
    if torch.cuda.is_available() and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
