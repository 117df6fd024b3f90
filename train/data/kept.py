"""Files that are made once, then mapped into memory: of text and tokens of any length."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor


def kept(path: Path, write: Callable[[BinaryIO], None], setting: str) -> Path:
    """``path``, which ``write`` fills if it is not there yet; it gets its name when it is whole.

    Of several processes one writes and the others wait. ``setting`` names what chooses another folder.
    """
    from filelock import FileLock

    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                fill(path, write)
    except PermissionError as error:
        raise PermissionError(f"{path.parent} takes no file ({error}); give {setting}=a folder to write to") from error
    return path


def fill(path: Path, write: Callable[[BinaryIO], None]) -> None:
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def mapped(path: Path, dtype: type[np.integer] = np.uint8) -> Tensor:
    """The file as integers (length,), to be read only: writing to it is a segmentation fault."""
    # Mapped for reading: Linux refuses a private mapping that could be written to if it is larger than the memory, as
    # torch.from_file and numpy's mode "c" make it.
    if path.stat().st_size == 0:  # nothing to map
        return torch.from_numpy(np.empty(0, dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.memmap(path, dtype=dtype, mode="r"))
