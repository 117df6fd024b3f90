"""Files that are whole or absent, whenever the process dies: the old content or the new, never half of it."""

import os
from pathlib import Path
from typing import Any

import torch


def save(state: dict[str, Any], path: Path) -> None:
    """Write to a temporary name, force it to the disk, rename."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_text(text: str, path: Path) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def load(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint, or None if there is none."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def random_states() -> dict[str, Any]:
    """The global generators of torch, for optimizers that draw from them; the harness itself does not."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state_all(states["cuda"])
