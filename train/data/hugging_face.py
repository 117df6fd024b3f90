"""Hugging Face data sets of documents as one text: the bytes of all of them in a file that is mapped into memory.

    data set --write, once--> <column>-<key>.bytes --map--> Text

Nothing downloads unless ``streaming`` asks for it: what is not on disk is an error with the command that gets it.

With ``streaming`` the file holds the first ``max_bytes`` of the data set's stream, and little more is ever downloaded.
Training draws from the file, as from any other text: the batch of a step depends on the seed and the step alone, a run
that was killed continues exactly, and later epochs and runs need no network. The file is as large as what is trained
on: the 10,000 steps of the paper see 2.6 billion tokens, about 12 GB.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from train.data.documents import Documents, Part, stored, streamed
from train.data.kept import kept, mapped
from train.data.text import Corpus, Text, Tokenizer
from train.data.text import split as split_text

DOCUMENTS = 1000  # read at once while the bytes are written: a few MB


def hugging_face(
    context: int,
    name: str | None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
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
        revision: of the data set on the Hub; refs/convert/parquet has the rows of one that is a script, which the
            datasets library no longer runs.
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
    source = (streamed if streaming else stored)(Part(name, config, split, revision), directory)
    identity = f"{source.identity} {column} {separator!r} {max_bytes}"
    path = Path(cache or source.folder) / f"{column}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.bytes"

    def fill(file: BinaryIO) -> None:
        write(source.documents(), name, column, separator.encode(), max_bytes, file)

    kept(path, fill, "data.cache")
    corpus = Corpus(*split_text(mapped(path)), folder=path.parent, identity=path.name)
    return Text(context, tokenizer=tokenizer, corpus=corpus)


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
