"""Text as bytes: random windows to train on, evenly spaced windows to validate on."""

import lzma
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor

FILES = Path(__file__).parent / "files"
HELD_OUT = 0.05  # last part of a user's own text, as in the paper's experiments (arXiv 2506.07254)


class Text:
    """Byte-level text.

    Args:
        context: bytes a model sees at once.
        directory: a folder of ``*.txt`` (its sorted concatenation; the last 5% is held out); default: the State of the
            Union addresses that ship with the project.
        parts: training and held-out text, integers (tokens,), in memory or mapped from files of any size, instead.
    """

    vocabulary = 256
    bytes_per_token = 1.0

    def __init__(
        self, context: int, directory: str | None = None, *, parts: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.context = context
        self.train, self.held_out = parts or read_parts(directory)
        for part, piece in (("training", self.train), ("held-out", self.held_out)):
            if len(piece) <= context:
                raise ValueError(f"context={context} needs more {part} text than the {len(piece)} tokens there are")

    @property
    def sizes(self) -> dict[str, int]:
        """What a model of this data must know."""
        return {"vocabulary": self.vocabulary, "context": self.context}

    def batch(self, size: int, generator: Generator) -> Tensor:
        """Windows (size, context + 1) of the training text, beginning anywhere."""
        starts = torch.randint(len(self.train) - self.context, (size,), generator=generator)
        return self.windows(self.train, starts)

    def validation(self, examples: int) -> Tensor:
        """The same windows (examples, context + 1) every time, evenly spaced over the held-out text."""
        last = len(self.held_out) - self.context - 1
        return self.windows(self.held_out, torch.arange(examples) * last // max(1, examples - 1))

    def windows(self, text: Tensor, starts: Tensor) -> Tensor:  # (bytes,), (N,)
        return text[starts[:, None] + torch.arange(self.context + 1)].long()  # (N, context + 1)


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


@cache  # a process that trains many models unpacks it once
def shipped_text() -> tuple[Tensor, Tensor]:
    """Training and held-out text of the State of the Union addresses, split by document."""
    train, held_out = (
        as_tensor(lzma.decompress((FILES / f"sotu_{part}.txt.xz").read_bytes())) for part in ("train", "val")
    )
    return train, held_out


def read_parts(directory: str | None) -> tuple[Tensor, Tensor]:
    """Training and held-out text, uint8 (bytes,) each: of a folder, or what ships."""
    return shipped_text() if directory is None else split(read_folder(Path(directory)))


def read_folder(directory: Path) -> Tensor:
    """The text files of a folder in the order of their names, one line apart: uint8 (bytes,)."""
    paths = sorted(directory.glob("*.txt"))
    if not paths:
        raise FileNotFoundError(
            f"data.directory={directory} holds no *.txt file; put the text there, e.g. "
            f"`mkdir -p {directory} && cp my_text.txt {directory}`, or leave data.directory unset for the text that "
            "ships"
        )
    return as_tensor(b"\n".join(path.read_bytes() for path in paths))


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """Training and held-out text, as views of ``text`` (bytes,)."""
    cut = len(text) - int(HELD_OUT * len(text))
    return text[:cut], text[cut:]
