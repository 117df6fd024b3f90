"""Hugging Face data sets of documents as one text: the bytes of all of them in a file that is mapped into memory.

    data set --write, once--> <column>-<key>.bytes --map--> Text

Nothing downloads unless ``streaming`` asks for it: what is not on disk is an error with the command that gets it.

With ``streaming`` the file holds the first ``max_bytes`` of the data set's stream, and little more is ever downloaded.
Training draws from the file, as from any other text: the batch of a step depends on the seed and the step alone, a run
that was killed continues exactly, and later epochs and runs need no network. The file is as large as what is trained
on: the 10,000 steps of the paper see 2.6 billion tokens, about 12 GB.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Union

from tqdm import tqdm

from train.data.kept import kept, mapped
from train.data.text import Corpus, Text, Tokenizer
from train.data.text import split as split_text

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Documents = Union["Dataset", "IterableDataset"]

DOCUMENTS = 1000  # read at once while the bytes are written: a few MB


def hugging_face(
    context: int,
    name: str | None,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    separator: str = "\0",
    directory: str | None = None,
    streaming: bool = False,
    max_bytes: int | None = None,
    cache: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Text:
    """The documents of a data set, in its order, the last 5% of their bytes held out.

    Args:
        context: tokens a model sees at once.
        name: of the data set on the Hub, like Skylion007/openwebtext.
        config: the part of the data set, like sample-10BT of HuggingFaceFW/fineweb-edu, if there are several.
        split: as the data set names it.
        column: where the text is.
        separator: ends each document; tokenizers know the default as an end of text.
        directory: where ``save_to_disk`` left the data set, or with ``streaming`` its files (parquet, JSON lines, …);
            default: the cache of the datasets library, or with ``streaming`` the Hub.
        streaming: read the documents as they come instead of a data set that is on disk.
        max_bytes: how much is taken, from the start; must be given with ``streaming``.
        cache: the folder of the byte file, as large as the text; default: beside the data set, or with ``streaming``
            the cache of the datasets library.
        tokenizer: of :mod:`train.data.tokens`; default: every byte is a token.
    """
    if name is None:
        raise ValueError("data=hugging_face needs data.name, as on the Hub: e.g. data.name=Skylion007/openwebtext")
    if streaming and max_bytes is None:
        raise ValueError("data.streaming=true needs data.max_bytes, how much to take: e.g. 10_000_000_000 for 10 GB")
    if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 1):
        raise ValueError(f"data.max_bytes={max_bytes} is given; a whole number above zero is required")
    source = (streamed if streaming else stored)(name, config, split, directory)
    identity = f"{source.identity} {column} {separator!r} {max_bytes}"
    path = Path(cache or source.folder) / f"{column}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.bytes"

    def fill(file: BinaryIO) -> None:
        write(source.documents(), name, column, separator.encode(), max_bytes, file)

    kept(path, fill, "data.cache")
    corpus = Corpus(*split_text(mapped(path)), folder=path.parent, identity=path.name)
    return Text(context, tokenizer=tokenizer, corpus=corpus)


@dataclass(frozen=True)
class Source:
    """Documents, what stands for their content, and the folder to keep them in."""

    documents: Callable[[], Documents]
    identity: str
    folder: Path


def stored(name: str, config: str | None, split: str, directory: str | None) -> Source:
    """The data set on disk, mapped into memory by arrow, never read whole."""
    dataset = load(name, config, split, directory)
    return Source(lambda: dataset, dataset._fingerprint, Path(dataset.cache_files[0]["filename"]).parent)


def streamed(name: str, config: str | None, split: str, directory: str | None) -> Source:
    """The data set as it comes. What the Hub changes goes unnoticed once a file is written; changed files do not."""
    datasets = library()
    files = sorted(path for path in Path(directory).rglob("*") if path.is_file()) if directory is not None else []
    if directory is not None and not files:
        raise FileNotFoundError(f"data.directory={directory} holds no files. {how_to_get_files(name, directory)}")
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]

    def documents() -> Documents:
        try:
            found: IterableDataset = datasets.load_dataset(directory or name, config, split=split, streaming=True)
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            raise FileNotFoundError(
                f"{name} cannot be streamed from {directory or 'the Hub'} ({error}). Check data.name, data.config and "
                f"data.split; without a network: {how_to_get_files(name, directory or name.split('/')[-1])}"
            ) from error
        return found if found.features is not None else found._resolve_features()

    identity = repr((name, config, split, states))
    return Source(documents, identity, Path(datasets.config.HF_DATASETS_CACHE))


def library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("data=hugging_face needs the datasets library: `pip install datasets`") from error
    return datasets


def load(name: str, config: str | None, split: str, directory: str | None) -> "Dataset":
    datasets = library()
    from datasets.packaged_modules.cache.cache import Cache

    try:
        if directory is not None:
            found = datasets.load_from_disk(str(Path(directory)), keep_in_memory=False)
        else:  # a builder that knows only what is in the cache, where load_dataset would download
            short = name.split("/")[-1]
            builder = Cache(dataset_name=short, repo_id=name, config_name=config, version="auto", hash="auto")
            found = builder.as_dataset()
    except (FileNotFoundError, IndexError, ValueError) as error:  # IndexError: it was saved without a row
        place = "the cache of the datasets library" if directory is None else f"data.directory={directory}"
        raise FileNotFoundError(
            f"{name} is not in {place} ({error}). {how_to_get(name, config, split, directory)}"
        ) from error
    splits = found if isinstance(found, datasets.DatasetDict) else {str(found.split or split): found}
    if split not in splits:
        raise ValueError(f"data.split={split} is not in {name}, which has here: {', '.join(splits)}")
    return splits[split]


def how_to_get(name: str, config: str | None, split: str, directory: str | None) -> str:
    target = directory or name.split("/")[-1]
    arguments = ", ".join(repr(argument) for argument in (name, config) if argument is not None)
    return (
        f'Get it by `python -c "import datasets; datasets.load_dataset({arguments}, split={split!r})'
        f'.save_to_disk({target!r})"` and give data.directory={target}'
    )


def how_to_get_files(name: str, directory: str) -> str:
    return (
        f"get its files by `hf download --repo-type dataset {name} --local-dir {directory}` "
        f"and give data.directory={directory}"
    )


def write(dataset: Documents, name: str, column: str, separator: bytes, max_bytes: int | None, file: BinaryIO) -> None:
    """The documents until there are ``max_bytes``; those that hold nothing leave nothing."""
    check_column(dataset, name, column)
    tables = dataset.select_columns(column).with_format("arrow").iter(DOCUMENTS)
    total = max_bytes or dataset.select_columns(column).data.nbytes
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Writing {file.name}", dynamic_ncols=True) as bar:
        for table in tables:
            documents = table[column].cast("large_binary").to_pylist()
            text = b"".join(document + separator for document in documents if document)
            written = file.write(text if max_bytes is None else text[: max_bytes - file.tell()])
            bar.update(written)
            if file.tell() == max_bytes:
                break
    if file.tell() == 0:
        raise ValueError(f"all documents of {name} are empty in data.column={column}; choose another column")


def check_column(dataset: Documents, name: str, column: str) -> None:
    features = (dataset.features or {}).items()
    texts = [key for key, value in features if getattr(value, "dtype", "") in ("string", "large_string")]
    if column not in texts:
        raise ValueError(
            f"data.column={column} is no column of text in {name}; those are: {', '.join(texts) or 'none'}"
        )
