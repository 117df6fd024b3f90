"""How good the samples of finished diffusion runs are: Fréchet distances, and how often a classifier sees their label.

    python -m benchmarks.sample_quality runs=[DIR,DIR,…] 'guidance=[1,2]'        (settings: conf/quality/)

The runs have ended with keep_checkpoint=true. Features are those of a classifier that is trained here, once, on the
same data. A guide: docs/sample-quality.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from benchmarks.cells import ROOT, compose_config
from benchmarks.classifier import INCEPTION_FEATURES, Judge, Judged, classifier_config, inception, trained_classifier
from benchmarks.command import SettingError, run_command
from benchmarks.csv_file import write_csv
from benchmarks.frechet import frechet_distance
from train import checkpoint
from train.config import build
from train.objectives import SAMPLING_BATCH, Diffusion
from train.parallel import local_device
from train.trainer import Trainer, generator

HEADINGS = {"frechet_distance": "Fréchet", "class_accuracy": "accuracy", "fid": "FID"}
UNAUGMENTED = {"shift": 0, "flip": False}  # settings of data that have these
Row = dict[str, Any]


@hydra.main(config_path=str(ROOT / "conf" / "quality"), config_name="sample_quality", version_base="1.3")
def main(config: DictConfig) -> None:
    run_command(lambda console: measure(config, console))


def measure(config: DictConfig, console: Console) -> int:
    """Measure, print and write the quality of the samples of all runs; the exit code."""
    runs = {directory: run_config(directory) for directory in map(Path, listed(config.runs))}
    data_config = common_data(runs)
    data = build(data_config)
    judge_config = classifier_config(config.classifier, data_config, data)
    check_number(config, judge_config.model.width, len(data.held_out))
    fid = inception(local_device()) if config.fid else None
    console.print(
        "Classifier: trained at the first time, about a minute on one core in the quick preset", highlight=False
    )
    judge = Judge(trained_classifier(judge_config, Path(config.classifiers)), fid)
    off = {name: value for name, value in UNAUGMENTED.items() if name in data_config}
    guidance = [float(weight) for weight in listed(config.guidance)]
    rows = measured(runs, guidance, data, build(data_config, **off), config.images, judge)
    path = Path(config.output) / "sample_quality.csv"
    write_csv(rows, path)
    console.print(table(rows, config))
    console.print(f"Written to {path}", highlight=False, soft_wrap=True)
    return 0


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, ListConfig) else [value]


def run_config(directory: Path) -> DictConfig:
    """The configuration of a finished diffusion run, to be loaded by one process.

    Raises:
        SettingError: the directory holds none, or one without a checkpoint.
    """
    if not (directory / "result.json").is_file():
        raise SettingError(
            f"{directory} holds no run that has ended; run `python -m train objective=diffusion …` to its end"
        )
    status = json.loads((directory / "result.json").read_text())["status"]
    if status != "finished":
        raise SettingError(f"the run in {directory} has {status}; give runs that have finished")
    config = OmegaConf.load(directory / "config.yaml")
    assert isinstance(config, DictConfig)
    if not issubclass(get_class(config.objective._target_), Diffusion):
        raise SettingError(
            f"the run in {directory} has {config.objective._target_}; give runs with objective=diffusion"
        )
    if checkpoint.newest(directory) is None:
        raise SettingError(f"{directory} has no checkpoint; train the run with keep_checkpoint=true")
    config.parallel = compose_config(()).parallel
    return config


def common_data(runs: dict[Path, DictConfig]) -> DictConfig:
    """The configuration of the data that the runs were trained on.

    Raises:
        SettingError: there is no run, or they were trained on different data.
    """
    if not runs:
        raise SettingError("runs=[] given; give the directories of finished diffusion runs, runs=[DIR,DIR,…]")
    (first, config), *others = runs.items()
    for directory, other in others:
        if other.data != config.data:
            raise SettingError(f"{first} and {directory} differ in data.*; measure them one at a time")
    data: DictConfig = config.data
    return data


def check_number(config: DictConfig, features: int, held_out: int) -> None:
    """Raise SettingError unless there are as many held-out images as asked for, and more than features."""
    if config.images > held_out:
        raise SettingError(
            f"images={config.images} but only {held_out} images are held out; give images={held_out} or less"
        )
    if config.fid:
        features = max(features, INCEPTION_FEATURES)
    if config.images <= features:
        raise SettingError(
            f"images={config.images} for {features} features; a covariance needs more images than features, and a "
            f"distance that is not mostly noise many times more ({held_out} images are held out)"
        )


def measured(
    runs: dict[Path, DictConfig], guidance: list[float], data: Any, unaugmented: Any, images: int, judge: Judge
) -> list[Row]:
    """A row for every run, set of weights and guidance weight; then of training images and of held-out ones."""
    held_out, labels = data.validation(images)
    real = judge([held_out])
    rows: list[Row] = []
    finals = {directory: scored_weights(directory) for directory in runs}
    total = images * len(guidance) * sum(map(len, finals.values()))
    with tqdm(total=total, unit="image", dynamic_ncols=True) as bar:
        for directory, config in runs.items():
            trainer = Trainer(config)
            trainer.resume(directory)
            assert isinstance(trainer.objective, Diffusion)
            for weights, _ in trainer.each_weights():
                for weight in guidance if weights in finals[directory] else []:
                    samples = counted(trainer.objective.samples(trainer.model, labels, weight), bar)
                    row = {"set": str(directory), "weights": weights, "guidance": weight}
                    row["loss"] = finals[directory][weights]
                    rows.append(row | scores(judge(samples), labels, real))
    for name, source in {"augmented training images": data, "training images": unaugmented}.items():
        rows.append({"set": name} | scores(judge([training_images(source, labels)]), labels, real))
    rows.append({"set": "held-out images", "images": images, "class_accuracy": accuracy(real, labels)})
    return rows


def scored_weights(directory: Path) -> dict[str, float]:
    """The weights of a run to sample with and their held-out losses: an optimizer's own averages, or else all."""
    final = json.loads((directory / "result.json").read_text())["final"]
    own = {name: measures["loss"] for name, measures in final.items() if name == "averaged"}
    return own or {name: measures["loss"] for name, measures in final.items()}


def counted(batches: Iterable[Tensor], bar: tqdm[Any]) -> Iterator[Tensor]:
    for batch in batches:
        yield batch
        bar.update(len(batch))


def scores(judged: Judged, labels: Tensor, real: Judged) -> Row:
    """Of images that were to have these labels, against real ones."""
    row = {
        "images": len(labels),
        "frechet_distance": frechet_distance(judged.features, real.features),
        "class_accuracy": accuracy(judged, labels),
    }
    if judged.inception is not None and real.inception is not None:
        row["fid"] = frechet_distance(judged.inception, real.inception)
    return row


def accuracy(judged: Judged, labels: Tensor) -> float:
    return float((judged.labels == labels).double().mean())


def training_images(data: Any, labels: Tensor) -> Tensor:
    """Training images (N, C, Y, X) of the given labels (N,), as training draws them.

    Raises:
        SettingError: there are none of a label.
    """
    missing = sorted(set(labels.tolist()) - set(data.labels.tolist()))
    if missing:
        raise SettingError(f"held-out images have the labels {missing}, but no training image has; remove or add some")
    wanted = labels.bincount(minlength=data.sizes["classes"])
    random = generator("training images")
    parts = []
    while wanted.any():
        images, found = data.batch(SAMPLING_BATCH, random)
        earlier = torch.nn.functional.one_hot(found, len(wanted)).cumsum(0)  # of each label, up to each image
        chosen = earlier[torch.arange(len(found)), found] <= wanted[found]
        wanted -= found[chosen].bincount(minlength=len(wanted))
        parts.append((images[chosen], found[chosen]))
    drawn, of = map(torch.cat, zip(*parts))
    return drawn[of.argsort()[labels.argsort().argsort()]]


def table(rows: list[Row], config: DictConfig) -> Table:
    """A line a row; of directories their last names."""
    columns = {"weights": "", "guidance": "g", "loss": ".4f", "frechet_distance": ".4g", "class_accuracy": ".1%"}
    columns |= {"fid": ".2f"} if config.fid else {}
    shown = Table("", *(HEADINGS.get(name, name) for name in columns), box=box.SIMPLE_HEAD)
    shown.caption = f"{config.images} images a row; Fréchet distances to the held-out ones"
    for row in rows:
        texts = (format(row[name], spec) if name in row else "" for name, spec in columns.items())
        shown.add_row(Path(row["set"]).name, *texts)
    return shown


if __name__ == "__main__":
    main()
