"""Text in the tokens of a BPE, of any source: encoded once, into files that are mapped into memory.

    Corpus (bytes) --encode, once--> <tokenizer>-<text>-train.uint16, …-held_out.uint16 beside the text --map--> Tokens

A zero byte ends a document and becomes <|endoftext|> where the tokenizer has it, else the token of that byte. Documents
are encoded apart. Bytes that are not UTF-8 are replaced.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

from train.data.kept import kept, mapped
from train.data.text import Corpus, Tokens

SEPARATOR = b"\0"  # ends each document: the one byte that is in no sane text
END_OF_TEXT = "<|endoftext|>"  # GPT-2's
BYTES = 256  # the tokens that every trained vocabulary has
TRAINED_ON = 2**28  # bytes of the training text that a BPE is trained on at most: minutes, a few GB of memory
PIECE = 2**16  # bytes of a document that are encoded as one; longer ones are cut where the tokens do not notice
BATCH = 64  # pieces encoded at once, on all cores
# Where a space follows a letter, words end by GPT-2's expression and those of its successors. In text that has no such
# place: before a character.
CUT = re.compile(rb".*[A-Za-z](?= )|.+(?=[\x00-\x7f\xc0-\xff])", re.DOTALL)


class Trained:
    """A byte-level BPE, trained on the training part of the text and kept beside it as ``tokenizer.json`` files are.

    Args:
        vocabulary: how many tokens there are, 256 or more; a short text may have fewer.
        cache: the folder of the files; default: beside the text.
    """

    def __init__(self, vocabulary: int, cache: str | None = None) -> None:
        if vocabulary < BYTES:
            raise ValueError(
                f"data.tokenizer.vocabulary={vocabulary} is given; at least {BYTES} are required, one for each byte"
            )
        self.vocabulary, self.cache = vocabulary, cache

    def __call__(self, corpus: Corpus) -> Tokens:
        name = f"bpe{self.vocabulary}"
        path = cache_of(corpus, self.cache) / f"{name}-{corpus.key}.json"

        def write(file: BinaryIO) -> None:
            file.write(trained(corpus.train, self.vocabulary).to_str().encode())

        kept(path, write, "data.tokenizer.cache")
        return tokens(corpus, Encoder.from_file(str(path)), name, self.cache)


class Pretrained:
    """The tokenizer in ``directory``: ``tokenizer.json``, or GPT-2's ``vocab.json`` and ``merges.txt``.

    Args:
        directory: where those files are.
        cache: the folder of the token files; default: beside the text.
    """

    def __init__(self, directory: str | None, cache: str | None = None) -> None:
        if directory is None:
            raise ValueError(f"tokenizer=pretrained needs data.tokenizer.directory=DIR. {how_to_get(Path('DIR'))}")
        self.encoder, self.cache = read_tokenizer(Path(directory)), cache

    def __call__(self, corpus: Corpus) -> Tokens:
        name = hashlib.sha256(self.encoder.to_str().encode()).hexdigest()[:16]
        return tokens(corpus, self.encoder, name, self.cache)


def cache_of(corpus: Corpus, cache: str | None) -> Path:
    return corpus.folder if cache is None else Path(cache)


def tokens(corpus: Corpus, encoder: Encoder, name: str, cache: str | None) -> Tokens:
    """The corpus as tokens, from the files that are named after the encoder and the text, or first into them."""
    vocabulary = max(encoder.get_vocab().values()) + 1
    dtype = np.uint16 if vocabulary <= 2**16 else np.uint32

    def part(which: str, text: Tensor) -> Tensor:
        path = cache_of(corpus, cache) / f"{name}-{corpus.key}-{which}.{np.dtype(dtype).name}"
        return mapped(kept(path, lambda file: encode(text, encoder, dtype, file), "data.tokenizer.cache"), dtype)

    train, held_out = part("train", corpus.train), part("held_out", corpus.held_out)
    return Tokens(train, held_out, vocabulary, len(corpus.held_out) / max(1, len(held_out)))


def encode(text: Tensor, encoder: Encoder, dtype: type[np.integer], file: BinaryIO) -> None:
    end = encoder.token_to_id(END_OF_TEXT)
    ends = encoder.encode(SEPARATOR.decode(), add_special_tokens=False).ids if end is None else [end]
    bar = tqdm(total=len(text), unit="B", unit_scale=True, desc=f"Writing {file.name}", dynamic_ncols=True)
    with bar:
        for batch in batches(text):
            encodings = encoder.encode_batch_fast([as_text(piece) for piece, _ in batch], add_special_tokens=False)
            for encoding, (_, ended) in zip(encodings, batch, strict=True):
                file.write(np.array(encoding.ids + ends * ended, dtype).tobytes())
            bar.update(sum(len(piece) + ended for piece, ended in batch))


def batches(text: Tensor) -> Iterator[list[tuple[bytes, bool]]]:
    found = pieces(text)
    while batch := [piece for _, piece in zip(range(BATCH), found)]:
        yield batch


def pieces(text: Tensor) -> Iterator[tuple[bytes, bool]]:
    """The documents of a text (bytes,), long ones in pieces; with each whether it ends a document."""
    data, start = text.numpy(), 0
    while start < len(data):
        window = data[start : start + PIECE].tobytes()
        end = window.find(SEPARATOR)
        if end >= 0:
            yield window[:end], True
            start += end + 1
            continue
        place = CUT.match(window) if start + PIECE < len(data) else None
        cut = place.end() if place else len(window)
        yield window[:cut], False
        start += cut


def as_text(piece: bytes) -> str:
    return piece.decode(errors="replace")


def trained(text: Tensor, vocabulary: int) -> Encoder:
    """A byte-level BPE, in whose tokens a line end is nothing but the last character."""
    encoder = Encoder(models.BPE())
    lines = pre_tokenizers.Split("\n", "merged_with_previous")
    encoder.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    encoder.train_from_iterator((as_text(piece) for piece, _ in pieces(text[:TRAINED_ON])), trainer)
    return encoder


def read_tokenizer(directory: Path) -> Encoder:
    whole, vocabulary, merges = (directory / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if whole.is_file():
        encoder = Encoder.from_file(str(whole))
        encoder.no_truncation()
        encoder.no_padding()
        return encoder
    for path in (vocabulary, merges):
        if not path.is_file():
            raise FileNotFoundError(f"neither {whole} nor {path} is there. {how_to_get(directory)}")
    encoder = Encoder(models.BPE.from_file(str(vocabulary), str(merges)))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    if encoder.token_to_id(END_OF_TEXT) is not None:
        encoder.add_special_tokens([END_OF_TEXT])
    return encoder


def how_to_get(directory: Path) -> str:
    return (
        f"Get GPT-2's by `hf download openai-community/gpt2 vocab.json merges.txt --local-dir {directory}`, "
        "or put another tokenizer.json there"
    )
