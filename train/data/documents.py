"""Where the documents of a Hugging Face data set come from: a disk, or a stream."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Documents = Union["Dataset", "IterableDataset"]


@dataclass(frozen=True)
class Part:
    """Of a data set on the Hub, as load_dataset is told."""

    name: str
    config: str | None
    split: str
    revision: str | None

    @property
    def arguments(self) -> tuple[str, ...]:
        return (self.name,) if self.config is None else (self.name, self.config)

    @property
    def settings(self) -> dict[str, str]:
        return {"split": self.split} | ({} if self.revision is None else {"revision": self.revision})

    def how_to_get(self, directory: str | None) -> str:
        target = directory or self.name.split("/")[-1]
        arguments = [repr(argument) for argument in self.arguments]
        settings = [f"{key}={value!r}" for key, value in self.settings.items()]
        return (
            f'Get it by `python -c "import datasets; datasets.load_dataset({", ".join(arguments + settings)})'
            f'.save_to_disk({target!r})"` and give data.directory={target}'
        )

    def how_to_get_files(self, directory: str | None) -> str:
        target = directory or self.name.split("/")[-1]
        revision = "" if self.revision is None else f" --revision {self.revision}"
        return (
            f"Get its files by `hf download --repo-type dataset {self.name}{revision} --local-dir {target}` and give "
            f"data.directory={target}"
        )


@dataclass(frozen=True)
class Source:
    """Documents, what stands for their content, and the folder to keep them in."""

    documents: Callable[[], Documents]
    identity: str
    folder: Path


def stored(part: Part, directory: str | None) -> Source:
    """The data set on disk, mapped into memory by arrow, never read whole."""
    dataset = load(part, directory)
    return Source(lambda: dataset, dataset._fingerprint, Path(dataset.cache_files[0]["filename"]).parent)


def load(part: Part, directory: str | None) -> "Dataset":
    datasets = library()
    from datasets.packaged_modules.cache.cache import Cache

    try:
        if directory is not None:
            found = datasets.load_from_disk(str(Path(directory)), keep_in_memory=False)
        else:  # a builder that knows only what is in the cache, where load_dataset would download
            short = part.name.split("/")[-1]
            builder = Cache(dataset_name=short, repo_id=part.name, config_name=part.config, version="auto", hash="auto")
            found = builder.as_dataset()
    except (FileNotFoundError, IndexError, ValueError) as error:  # IndexError: it was saved without a row
        place = "the cache of the datasets library" if directory is None else f"data.directory={directory}"
        raise FileNotFoundError(f"{part.name} is not in {place} ({error}). {part.how_to_get(directory)}") from error
    splits = found if isinstance(found, datasets.DatasetDict) else {str(found.split or part.split): found}
    if part.split not in splits:
        raise ValueError(f"data.split={part.split} is not in {part.name}, which has here: {', '.join(splits)}")
    return splits[part.split]


def streamed(part: Part, directory: str | None) -> Source:
    """The data set as it comes, from the Hub or from its files; its identity knows of changes to the latter alone."""
    datasets = library()
    arguments: tuple[str, ...] = part.arguments
    settings, states = part.settings, []
    if directory is not None:
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        if not files:
            raise FileNotFoundError(f"data.directory={directory} holds no files. {part.how_to_get_files(directory)}")
        arguments, settings = (directory, *part.arguments[1:]), {"split": part.split}
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]

    def documents() -> Documents:
        try:
            found: IterableDataset = datasets.load_dataset(*arguments, **settings, streaming=True)
        # RuntimeError: it is a script
        except (ConnectionError, FileNotFoundError, RuntimeError, ValueError) as error:
            raise FileNotFoundError(
                f"{part.name} cannot be streamed from {directory or 'the Hub'} ({error}). Check data.name, data.config "
                "and data.split; give data.revision=refs/convert/parquet if it is a script. Without a network: "
                + part.how_to_get_files(directory)
            ) from error
        return found if found.features is not None else found._resolve_features()

    return Source(documents, repr((part, states)), Path(datasets.config.HF_DATASETS_CACHE))


def library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("data=hugging_face needs the datasets library: `pip install datasets`") from error
    return datasets
