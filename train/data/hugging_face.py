"""Hugging Face data sets of documents as one text: the bytes of all of them in a file that is mapped into memory.

    data set (arrow files) --write, once--> <column>-<fingerprint>.bytes beside them --map--> Text

Nothing downloads: what is not on disk is an error with the command that gets it.
"""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from train.data.text import Text
from train.data.text import split as split_text

if TYPE_CHECKING:
    from datasets import Dataset

SEPARATOR = b"\0"  # ends each document: the one byte that is in no sane text
DOCUMENTS = 1000  # read at once while the bytes are written: a few MB


def hugging_face(
    context: int,
    name: str | None,
    config: str | None = None,
    split: str = "train",
    column: str = "text",
    directory: str | None = None,
    cache: str | None = None,
) -> Text:
    """The documents of a data set, in its order, the last 5% of their bytes held out.

    Args:
        context: bytes a model sees at once.
        name: of the data set on the Hub, like Skylion007/openwebtext.
        config: the part of the data set, like sample-10BT of HuggingFaceFW/fineweb-edu, if there are several.
        split: as the data set names it.
        column: where the text is.
        directory: where ``save_to_disk`` left the data set; default: the cache of the datasets library.
        cache: the folder of the byte file, as large as the text; default: beside the data set.
    """
    if name is None:
        raise ValueError("data=hugging_face needs data.name, as on the Hub: e.g. data.name=Skylion007/openwebtext")
    dataset = load(name, config, split, directory)
    texts = [
        key for key, value in dataset.features.items() if getattr(value, "dtype", "") in ("string", "large_string")
    ]
    if column not in texts:
        raise ValueError(
            f"data.column={column} is no column of text in {name}; those are: {', '.join(texts) or 'none'}"
        )
    return Text(context, parts=split_text(mapped(byte_file(dataset, column, cache))))


def load(name: str, config: str | None, split: str, directory: str | None) -> "Dataset":
    """The data set, mapped into memory by arrow, never read whole."""
    try:
        import datasets
        from datasets.packaged_modules.cache.cache import Cache
    except ImportError as error:
        raise ImportError("data=hugging_face needs the datasets library: `pip install datasets`") from error
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


def byte_file(dataset: "Dataset", column: str, cache: str | None) -> Path:
    """The file of the documents' bytes, written if it is not there yet.

    Its name holds the fingerprint of the data set: another content is another file. Of several processes one writes
    and the others wait.
    """
    from filelock import FileLock

    folder = Path(dataset.cache_files[0]["filename"]).parent if cache is None else Path(cache)
    path = folder / f"{column}-{dataset._fingerprint}.bytes"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    write(dataset, column, path)
        except PermissionError as error:
            raise PermissionError(
                f"{folder} takes no byte file ({error}); give data.cache=a folder to write to"
            ) from error
    return path


def write(dataset: "Dataset", column: str, path: Path) -> None:
    """Documents that hold nothing leave nothing; the file gets its name when it is whole."""
    temporary = path.with_name(path.name + ".new")
    tables = dataset.select_columns(column).with_format("arrow").iter(DOCUMENTS)
    bar = tqdm(total=len(dataset), unit=" documents", desc=f"Writing {path}", dynamic_ncols=True)
    try:
        with bar, open(temporary, "wb") as file:
            for table in tables:
                documents = table[column].cast("large_binary").to_pylist()
                file.write(b"".join(document + SEPARATOR for document in documents if document))
                bar.update(len(documents))
            file.flush()
            os.fsync(file.fileno())
        if temporary.stat().st_size == 0:
            raise ValueError(f"all {len(dataset)} documents are empty in data.column={column}; choose another column")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def mapped(path: Path) -> Tensor:
    """The file as uint8 (bytes,), to be read only: writing to it is a segmentation fault."""
    # Mapped for reading: Linux refuses a private mapping that could be written to if it is larger than the memory, as
    # torch.from_file and numpy's mode "c" make it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r"))
