"""Text as bytes or tokens: random windows to train on, evenly spaced windows to validate on."""

import hashlib
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

FILES = Path(__file__).parent / "files"
HELD_OUT = 0.05  # last part of a user's own text, as in the paper's experiments (arXiv 2506.07254)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, uint8 (bytes,) each, in memory or mapped from files of any size.

    Attributes:
        folder: where to keep what is made of it.
        identity: stands for the content if reading all of it would take long; default: its sha256.
    """

    train: Tensor
    held_out: Tensor
    folder: Path
    identity: str | None = None

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits that stand for the content."""
        digest = hashlib.sha256(f"{len(self.train)} {self.identity}".encode())
        if self.identity is None:
            digest.update(self.train.numpy().data)
            digest.update(self.held_out.numpy().data)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Tokens:
    """Training and held-out text as integers (tokens,) below ``vocabulary``; bytes are tokens too."""

    train: Tensor
    held_out: Tensor
    vocabulary: int = 256
    bytes_per_token: float = 1.0


Tokenizer = Callable[[Corpus], Tokens]  # None stands for bytes


class Text:
    """Windows of a text.

    Args:
        context: tokens a model sees at once.
        directory: a folder of ``*.txt`` (its sorted concatenation; the last 5% is held out); default: the State of the
            Union addresses that ship with the project.
        tokenizer: of :mod:`train.data.tokens`; default: every byte is a token.
        corpus: the text instead of what a directory holds.
    """

    def __init__(
        self,
        context: int,
        directory: str | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        corpus: Corpus | None = None,
    ) -> None:
        corpus = corpus or read_corpus(directory)
        tokens = Tokens(corpus.train, corpus.held_out) if tokenizer is None else tokenizer(corpus)
        self.context, self.vocabulary, self.bytes_per_token = context, tokens.vocabulary, tokens.bytes_per_token
        self.train, self.held_out = tokens.train, tokens.held_out
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

    def windows(self, text: Tensor, starts: Tensor) -> Tensor:  # (tokens,), (N,)
        chosen = (starts[:, None] + torch.arange(self.context + 1)).numpy()  # (N, context + 1)
        return torch.from_numpy(text.numpy()[chosen].astype(np.int64))  # numpy's: torch indexes few types of uint16


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def read_corpus(directory: str | None) -> Corpus:
    """The text of a folder, or what ships."""
    return shipped_text() if directory is None else Corpus(*split(read_folder(Path(directory))), Path(directory))


@cache  # a process that trains many models unpacks it once
def shipped_text() -> Corpus:
    """The State of the Union addresses, split by document."""
    train, held_out = (
        as_tensor(lzma.decompress((FILES / f"sotu_{part}.txt.xz").read_bytes())) for part in ("train", "val")
    )
    return Corpus(train, held_out, FILES)


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
