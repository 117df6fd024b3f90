"""Tokens of a text: the same of every source, encoded once, as many bytes as the text."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from runs import smoke
from stand_ins import SQUARES, seeded, write_documents, write_gpt2, write_text
from tokenizers import pre_tokenizers

from train.data import tokens
from train.data.hugging_face import hugging_face
from train.data.text import Text
from train.data.tokens import Pretrained, Trained
from train.trainer import Trainer

END = 0  # <|endoftext|> of write_gpt2
TEXTS = [f"{i} fine apples aren't\n\n  {i * i}  pears, \u00e9 " * 9 for i in range(40)]


def training_part(text: str) -> str:
    """What is not held out; a character that is cut is replaced."""
    content = text.encode()
    return content[: len(content) - int(0.05 * len(content))].decode(errors="replace")


def test_a_vocabulary_of_bytes_is_the_bytes(tmp_path):
    """Then every byte is a token of its own, whichever number it has; and the held-out part is the same."""
    directory = write_text(tmp_path, "Nürnberg, über 8 Brücken.\n".encode() * 40)
    text, data = Text(4, directory), Text(4, directory, Trained(256))
    assert data.bytes_per_token == 1
    for part in ("train", "held_out"):
        pairs = set(zip(getattr(text, part).tolist(), getattr(data, part).tolist(), strict=True))
        assert len(pairs) == len({byte for byte, _ in pairs}) == len({token for _, token in pairs})


def test_a_larger_vocabulary_has_longer_tokens(tmp_path):
    """As many as were asked for while the text has pairs to merge; their lengths add up to the held-out bytes."""
    directory = write_text(tmp_path, SQUARES)
    data = Text(4, directory, Trained(400))
    assert data.sizes == {"vocabulary": 400, "context": 4}
    assert 256 <= int(data.train.int().max()) < 400
    assert data.bytes_per_token > 1.5
    assert data.bytes_per_token * len(data.held_out) == pytest.approx(len(Text(4, directory).held_out))
    batch = data.batch(3, seeded())
    assert batch.shape == (3, 5)
    assert batch.dtype == torch.int64


def test_bits_per_byte_count_the_bytes_of_a_token(tmp_path):
    """A model that says nothing has log2(vocabulary) bits for every token, spread over its bytes."""
    settings = ("tokenizer=trained", "data.tokenizer.vocabulary=300", f"data.directory={write_text(tmp_path, SQUARES)}")
    trainer = Trainer(smoke("language_modelling", "splus", *settings))
    data = trainer.objective.data
    torch.nn.init.zeros_(trainer.model.head.weight)
    with torch.no_grad():
        losses = trainer.objective.losses(trainer.model, data.validation(4))
    assert float(losses["loss"]) == pytest.approx(math.log(300), rel=1e-6)
    assert float(losses["bits_per_byte"]) == pytest.approx(math.log2(300) / data.bytes_per_token, rel=1e-6)


@pytest.mark.parametrize("kind", ["trained", "pretrained"])
def test_a_text_has_the_same_tokens_from_every_source(tmp_path, kind):
    tokenizer = Trained(290) if kind == "trained" else Pretrained(write_gpt2(tmp_path / "gpt2"))
    write_text(tmp_path, "".join(text + "\0" for text in TEXTS).encode())
    folder = Text(4, str(tmp_path), tokenizer)
    documents = hugging_face(4, "a", directory=write_documents(tmp_path / "documents", *TEXTS), tokenizer=tokenizer)
    assert folder.vocabulary == documents.vocabulary >= 290
    assert folder.bytes_per_token == documents.bytes_per_token > 1
    for part in ("train", "held_out"):
        assert torch.equal(getattr(folder, part), getattr(documents, part))


def test_documents_are_encoded_apart_and_end_in_the_token_for_it(tmp_path):
    directory = write_text(tmp_path, "\0".join(TEXTS).encode())
    tokenizer = Pretrained(write_gpt2(tmp_path / "gpt2"))
    text, data = Text(4, directory), Text(4, directory, tokenizer)
    for part in ("train", "held_out"):
        *whole, last = getattr(text, part).numpy().tobytes().decode().split("\0")
        expected = [token for document in whole for token in [*tokenizer.encoder.encode(document).ids, END]]
        assert getattr(data, part).tolist() == expected + tokenizer.encoder.encode(last).ids


def test_long_documents_are_cut_where_their_tokens_do_not_notice(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 256)
    monkeypatch.setattr(tokens, "BATCH", 3)
    draw = random.Random(0)
    text = "".join(draw.choices(["ab ", "can't", "  ", " \n\n", "\t", "12", "?! ", "é", "中", "word", " we"], k=5000))
    directory = write_text(tmp_path, text.encode())
    tokenizer = Pretrained(write_gpt2(tmp_path / "gpt2", text))
    assert Text(4, directory, tokenizer).train.tolist() == tokenizer.encoder.encode(training_part(text)).ids


def test_documents_without_a_space_are_cut_between_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "PIECE", 64)
    text = "中é😀\n" * 500
    tokenizer = Pretrained(write_gpt2(tmp_path / "gpt2"))
    data = Text(4, write_text(tmp_path, text.encode()), tokenizer)
    assert tokenizer.encoder.decode(data.train.tolist()) == training_part(text)


def test_gpt2_s_files_mean_what_they_mean_to_transformers(tmp_path):
    """As vocab.json and merges.txt, and as one tokenizer.json, whose limit of length is not ours."""
    from transformers import GPT2TokenizerFast

    reference = GPT2TokenizerFast.from_pretrained(write_gpt2(tmp_path / "gpt2"))
    text = "\n\n".join(TEXTS)
    directory = write_text(tmp_path, text.encode())
    expected = reference(training_part(text)).input_ids
    assert Text(4, directory, Pretrained(str(tmp_path / "gpt2"))).train.tolist() == expected
    reference.backend_tokenizer.enable_truncation(7)
    (tmp_path / "whole").mkdir()
    reference.backend_tokenizer.save(str(tmp_path / "whole" / "tokenizer.json"))
    assert Text(4, directory, Pretrained(str(tmp_path / "whole"))).train.tolist() == expected


def test_tokens_are_written_once_for_each_text_and_tokenizer(tmp_path, monkeypatch):
    directory, cache = write_text(tmp_path, SQUARES), tmp_path / "cache"
    first = Text(4, directory, Trained(300, str(cache)))
    assert first.train.dtype == torch.uint16
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "encode", None)
        patch.setattr(tokens, "trained", None)
        again = Text(4, directory, Trained(300, str(cache)))
    assert torch.equal(again.train, first.train)
    assert torch.equal(again.held_out, first.held_out)
    write_text(tmp_path, SQUARES[:-1] + b"!")
    assert not torch.equal(Text(4, directory, Trained(300, str(cache))).held_out, first.held_out)
    assert Text(4, directory, Trained(301, str(cache))).vocabulary == 301
    assert len(list(cache.glob("*.uint16"))) == 6
    assert not list(cache.glob("*.new"))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, torch.uint16), (2**16 + 1, torch.uint32)])
def test_the_largest_token_fits(tmp_path, vocabulary, dtype):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: letter == "a")
    names = {letter: vocabulary - 256 + i for i, letter in enumerate(letters)}
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.json").write_text(json.dumps(names))
    data = Text(4, write_text(tmp_path, b"a" * 100), Pretrained(str(tmp_path)))
    assert data.vocabulary == vocabulary
    assert data.train.dtype == dtype
    assert (data.batch(2, seeded()) == vocabulary - 1).all()


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.tokenizer.vocabulary=100 is given; at least 256"):
        Trained(100)
    with pytest.raises(ValueError, match=r"needs data.tokenizer.directory=DIR. Get GPT-2's by `hf download"):
        Pretrained(None)
    place = Path(write_gpt2(tmp_path / "gpt2"))
    (place / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match=rf"tokenizer.json nor .*merges.txt is there.* --local-dir {place}`"):
        Pretrained(str(place))
    with pytest.raises(ValueError, match="context=4 needs more held-out text than the 0 tokens"):
        Text(4, write_text(tmp_path, b"apples"), Trained(256))
