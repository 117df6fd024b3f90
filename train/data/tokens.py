"""Text as tokens of a byte-level BPE that is trained on it: a vocabulary of any size."""

from functools import cache

import torch
from tokenizers import Encoding, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from train.data.text import Text, read_parts

BYTES = 256  # the tokens that every vocabulary has


class Tokens(Text):
    """Text in the tokens of a byte-level BPE, trained on the training part.

    The whole text is encoded in memory. Bytes that are not UTF-8 are replaced.

    Args:
        context: tokens a model sees at once.
        vocabulary: how many tokens there are, 256 or more.
        directory: a folder of ``*.txt``, as for :class:`~train.data.text.Text`.
    """

    def __init__(self, context: int, vocabulary: int, directory: str | None = None) -> None:
        if vocabulary < BYTES:
            raise ValueError(f"data.vocabulary={vocabulary} is given; at least {BYTES} are required, one for each byte")
        train, held_out, self.vocabulary, self.bytes_per_token = encoded(vocabulary, directory)
        super().__init__(context, parts=(train, held_out))


@cache  # a process that trains many models encodes it once
def encoded(vocabulary: int, directory: str | None) -> tuple[Tensor, Tensor, int, float]:
    """Training and held-out tokens, int32 (tokens,) each; how many different ones there are, fewer than asked of a
    short text; and the mean length of a held-out one in bytes.
    """
    parts = read_parts(directory)
    texts = [part.numpy().tobytes().decode(errors="replace").splitlines(True) for part in parts]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[0], trainer)
    train, held_out = (as_integers(tokenizer.encode_batch_fast(lines)) for lines in texts)
    return train, held_out, tokenizer.get_vocab_size(), len(parts[1]) / len(held_out)


def as_integers(lines: list[Encoding]) -> Tensor:
    return torch.tensor([token for line in lines for token in line.ids], dtype=torch.int32)
