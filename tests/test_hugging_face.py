"""Hugging Face data sets as text: from disk without a network, or the start of a stream, taken once."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import torch
from runs import smoke
from stand_ins import write_documents

from train.data import hugging_face
from train.data.hugging_face import hugging_face as documents
from train.data.text import Text
from train.trainer import Trainer


def content(data: Text) -> bytes:
    return torch.cat([data.train, data.held_out]).numpy().tobytes()


@pytest.mark.filterwarnings("error")
def test_documents_become_one_text_without_the_empty_ones(tmp_path):
    data = documents(2, "some/texts", directory=write_documents(tmp_path, "first", "", "zwei – Ä", None, "third" * 20))
    assert content(data) == ("first\0zwei – Ä\0" + "third" * 20 + "\0").encode()
    assert len(data.held_out) == int(0.05 * len(content(data)))


def test_bytes_are_written_once_for_each_content(tmp_path, monkeypatch):
    place = {"directory": write_documents(tmp_path / "set", "a" * 99), "cache": str(tmp_path / "bytes")}
    first = content(documents(2, "some/texts", **place))
    with monkeypatch.context() as patch:
        patch.setattr(hugging_face, "write", None)
        assert content(documents(2, "some/texts", **place)) == first
    write_documents(tmp_path / "set", "b" * 99)
    assert content(documents(2, "some/texts", **place)) == b"b" * 99 + b"\0"


class Cached(datasets.GeneratorBasedBuilder):  # what load_dataset leaves in the cache of the library
    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features({"body": datasets.Value("large_string")}))

    def _split_generators(self, _: object) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator(name, {"text": name}) for name in ("train", "test")]

    def _generate_examples(self, text: str) -> Iterator[tuple[int, dict[str, str]]]:
        yield 0, {"body": f"{self.config.name} {text} " * 9}


def test_data_sets_in_the_cache_of_the_library_are_read_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", look_up := Mock(side_effect=OSError))
    for name in ("small", "large"):
        Cached(str(tmp_path), "texts", name, hash="0", repo_id="some/texts").download_and_prepare()
    data = documents(2, "some/texts", config="large", split="test", column="body")
    assert content(data) == b"large test " * 9 + b"\0"
    with pytest.raises(FileNotFoundError, match=r"multiple 'some/texts' configurations.*small"):
        documents(2, "some/texts", column="body")
    with pytest.raises(FileNotFoundError, match=r"Couldn't find.*load_dataset\('some/others', 'x', split='test'\)"):
        documents(2, "some/others", config="x", split="test")
    look_up.assert_not_called()


def test_the_command_that_an_error_names_gets_the_data(tmp_path, monkeypatch):
    directory = str(tmp_path / "texts")
    with pytest.raises(FileNotFoundError, match=f"and give data.directory={directory}$") as error:
        documents(2, "some/texts", config="small", revision="main", directory=directory)
    found = datasets.Dataset.from_dict({"text": ["a" * 99]})
    monkeypatch.setattr(datasets, "load_dataset", load_dataset := Mock(return_value=found))
    exec(re.findall(r'`python -c "(.*)"`', str(error.value))[0])
    load_dataset.assert_called_once_with("some/texts", "small", split="train", revision="main")
    assert content(documents(2, "some/texts", config="small", directory=directory)) == b"a" * 99 + b"\0"


def test_documents_that_cannot_be_used_are_refused(tmp_path):
    place = {"directory": write_documents(tmp_path / "empty", "", None)}
    with pytest.raises(ValueError, match=r"all documents of some/texts are empty in data.column=text"):
        documents(2, "some/texts", **place)
    assert not [path for path in (tmp_path / "empty").iterdir() if path.suffix in (".bytes", ".new")]
    with pytest.raises(ValueError, match=r"data.column=id is no column of text in some/texts; those are: text"):
        documents(2, "some/texts", column="id", **place)
    with pytest.raises(FileNotFoundError, match=r"some/texts is not in data.directory"):
        documents(2, "some/texts", directory=write_documents(tmp_path / "none"))
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a" * 30]})).save_to_disk(tmp_path / "dict")
    place["directory"] = str(tmp_path / "dict")
    with pytest.raises(ValueError, match=r"data.split=test is not in some/texts, which has here: train"):
        documents(2, "some/texts", split="test", **place)
    with pytest.raises(ValueError, match="context=2 needs more held-out text than the 1 tokens"):
        documents(2, "some/texts", **place)


def write_parquet(folder: Path, *texts: str) -> str:
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_dict({"id": range(len(texts)), "text": texts}).to_parquet(folder / "part-0.parquet")
    return str(folder)


def write_lines(folder: Path, *texts: str) -> str:
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_dict({"text": texts}).to_json(folder / "lines.jsonl")
    return str(folder)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache of the library, without a network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket, "getaddrinfo", look_up := Mock(side_effect=OSError))
    yield tmp_path / "cache"
    look_up.assert_not_called()


@pytest.fixture
def hub(cache, monkeypatch) -> Mock:
    """load_dataset, for streams of 100,000 documents of 10 bytes; `hub.read` counts those that were read."""

    def texts() -> Iterator[dict[str, str]]:
        for i in range(100_000):
            hub.read += 1
            yield {"text": f"{i:9}"}

    hub = Mock(side_effect=lambda *_, **__: datasets.IterableDataset.from_generator(texts), read=0)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    return hub


STREAM = {"streaming": True, "max_bytes": 10_005}


def test_no_more_of_a_stream_is_read_than_is_taken(hub):
    data = documents(2, "some/texts", config="large", split="all", revision="main", **STREAM)
    hub.assert_called_once_with("some/texts", "large", split="all", revision="main", streaming=True)
    assert content(data) == "".join(f"{i:9}\0" for i in range(1001)).encode()[:10_005]
    assert hub.read < 3 * hugging_face.DOCUMENTS  # two batches, and the first few for the names of their columns


def test_a_stream_is_taken_once(hub, cache):
    """Another name, part or amount is another file."""
    first = documents(2, "some/texts", **STREAM)
    hub.side_effect = AssertionError
    assert content(documents(2, "some/texts", **STREAM)) == content(first)
    for other in ({"name": "other/texts"}, {"config": "large"}, {"revision": "main"}, {"max_bytes": 99}):
        with pytest.raises(AssertionError):
            documents(**{"context": 2, "name": "some/texts"} | STREAM | other)
    assert len(list(cache.glob("*.bytes"))) == 1


def test_a_stream_that_breaks_off_leaves_nothing(hub, cache):
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise ConnectionError("reset by peer")

    whole = hub.side_effect
    hub.side_effect = lambda *_, **__: datasets.IterableDataset.from_generator(broken)
    with pytest.raises(ConnectionError):
        documents(2, "some/texts", **STREAM)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]
    hub.side_effect = whole
    assert len(content(documents(2, "some/texts", **STREAM))) == 10_005


def test_training_on_a_stream_continues_without_it(hub, tmp_path):
    settings = ("data=hugging_face", "data.name=some/texts", "data.streaming=true", "data.max_bytes=10005")
    config = smoke("language_modelling", "adam", *settings)
    straight, stopped = Trainer(config), Trainer(config)
    stopped.train_step()
    stopped.save(tmp_path)
    hub.side_effect = ConnectionError
    continued = Trainer(config)
    assert continued.resume(tmp_path)
    straight.train_step()
    assert straight.train_step() == continued.train_step()


@pytest.mark.parametrize("write", [write_parquet, write_lines])
def test_files_in_a_directory_are_streamed(tmp_path, cache, write):
    place = write(tmp_path / "files", "first", "", "zwei – Ä" * 9)
    assert content(documents(2, "a", directory=place, **STREAM)) == ("first\0" + "zwei – Ä" * 9 + "\0").encode()
    write(tmp_path / "files", "other" * 20)
    assert content(documents(2, "a", directory=place, **STREAM)) == b"other" * 20 + b"\0"


def test_rows_that_are_lines_need_no_separator(tmp_path):
    place = write_documents(tmp_path, " = Title = \n", "", " Text . \n" * 9)
    data = documents(2, "Salesforce/wikitext", separator="", directory=place)
    assert content(data) == b" = Title = \n" + b" Text . \n" * 9


def test_the_start_of_a_data_set_on_disk_is_a_text_of_its_own(tmp_path):
    place = write_documents(tmp_path, *["a" * 9] * 50)
    assert len(content(documents(2, "some/texts", directory=place))) == 500
    assert content(documents(2, "some/texts", directory=place, max_bytes=75)) == (b"a" * 9 + b"\0") * 7 + b"a" * 5


def test_streams_that_cannot_be_used_are_refused(tmp_path, hub):
    with pytest.raises(ValueError, match=r"data.streaming=true needs data.max_bytes"):
        documents(2, "some/texts", streaming=True)
    for wrong in (0, 1e9):
        with pytest.raises(ValueError, match=rf"data\.max_bytes={wrong} is given; a whole"):
            documents(2, "some/texts", streaming=True, max_bytes=wrong)
    with pytest.raises(ValueError, match=r"data.column=body is no column of text in some/texts; those are: text"):
        documents(2, "some/texts", column="body", **STREAM)
    hub.side_effect = ConnectionError("no network")
    get = f"`hf download --repo-type dataset some/texts --local-dir {tmp_path}/files` and give data.directory="
    with pytest.raises(FileNotFoundError, match=r"streamed from the Hub \(no network\).*`hf download .* some/texts"):
        documents(2, "some/texts", **STREAM)
    with pytest.raises(FileNotFoundError, match=rf"holds no files.*{get}"):
        documents(2, "some/texts", directory=str(tmp_path / "files"), **STREAM)
