"""How good samples are: the Fréchet distance, and the command that measures it on runs."""

import csv
import json
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from rich.console import Console
from runs import configuration, smoke
from scipy.linalg import sqrtm
from torch import Generator, Tensor

from benchmarks import classifier
from benchmarks.cells import ROOT
from benchmarks.command import SettingError
from benchmarks.frechet import frechet_distance
from benchmarks.sample_quality import measure, training_images
from train.data.images import Images
from train.loop import run

D = 5


def drawn(seed: int, examples: int = 40) -> Tensor:
    """Correlated features, not centred."""
    random = Generator().manual_seed(seed)
    mixed = torch.randn(D, D, generator=random, dtype=torch.float64)
    return torch.randn(examples, D, generator=random, dtype=torch.float64) @ mixed + seed


def gaussian(root: Tensor, mean: Tensor, seed: int = 0) -> Tensor:
    """Features whose sample mean and covariance are exactly ``mean`` and rootᵀ · root."""
    white = torch.randn(30, len(root), generator=Generator().manual_seed(seed), dtype=torch.float64)
    white = torch.linalg.qr(white - white.mean(0)).Q * 29**0.5
    return white @ root + mean


def test_distance_of_a_set_to_itself_is_zero() -> None:
    """In any order, and where features do not vary or repeat each other."""
    x = drawn(1)
    x[:, 1], x[:, 2] = 3.0, x[:, 0]
    assert frechet_distance(x, x.flip(0)) == pytest.approx(0, abs=1e-12)


def test_distance_grows_by_the_squared_shift() -> None:
    x, y = drawn(1), drawn(2, 60)
    centred = frechet_distance(x - x.mean(0), y - y.mean(0))
    shift = torch.arange(D, dtype=torch.float64)
    assert frechet_distance(x - x.mean(0) + shift, y - y.mean(0)) == pytest.approx(centred + float(shift @ shift))


def test_distance_is_symmetric() -> None:
    x, y = drawn(1), drawn(2, 60)
    assert frechet_distance(x, y) == pytest.approx(frechet_distance(y, x), rel=1e-12)


def test_distance_is_that_of_gaussians() -> None:
    """Σ (σ - τ)² for independent features; for two dependent ones tr (ST)^(1/2) = (tr ST + 2 |ST|^(1/2))^(1/2)."""
    zero, sigma, tau = torch.zeros(3), torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([3.0, 2.0, 0.1]).double()
    distance = frechet_distance(gaussian(sigma.diag(), zero), gaussian(tau.diag(), zero, seed=1))
    assert distance == pytest.approx(float((sigma - tau).square().sum()))

    first, second = torch.tensor([[2.0, 1.0], [0.0, 1.0]]).double(), torch.tensor([[1.0, -3.0], [1.0, 0.5]]).double()
    S, T = first.T @ first, second.T @ second
    shared = ((S @ T).trace() + 2 * (S @ T).det().sqrt()).sqrt()
    distance = frechet_distance(gaussian(first, torch.zeros(2)), gaussian(second, torch.zeros(2), seed=1))
    assert distance == pytest.approx(float(S.trace() + T.trace() - 2 * shared))


def test_distance_agrees_with_the_root_of_the_product_of_covariances() -> None:
    """The definition, by scipy."""
    x, y = drawn(1), drawn(2, 60)
    S, T = x.T.cov(), y.T.cov()
    defined = (x.mean(0) - y.mean(0)).square().sum() + (S + T).trace() - 2 * sqrtm((S @ T).numpy()).real.trace()
    assert frechet_distance(x, y) == pytest.approx(float(defined), rel=1e-10)


def test_features_without_a_distance_are_refused() -> None:
    with pytest.raises(ValueError, match="5 examples of 5 features were given"):
        frechet_distance(drawn(1, examples=D), drawn(2))
    with pytest.raises(ValueError, match="both sets need the same"):
        frechet_distance(drawn(1), drawn(2)[:, 1:])
    with pytest.raises(ValueError, match="all finite"):
        frechet_distance(drawn(1), drawn(2) * torch.nan)


def settings(output: Path, *overrides: str) -> DictConfig:
    """Of the command, with a classifier that trains in a moment."""
    from hydra import compose, initialize_config_dir

    few = ("images=40", "classifier=['preset=smoke']", f"classifiers={output}", f"output={output}")
    with initialize_config_dir(str(ROOT / "conf" / "quality"), version_base="1.3"):
        return compose("sample_quality", overrides=[*few, *overrides])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Finished smoke runs of diffusion, by their optimizers."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("adam", "splus"):
        run(smoke("diffusion", name, "keep_checkpoint=true"), root / name, progress=False)
    return {name: root / name for name in ("adam", "splus")}


def test_runs_are_measured_with_every_weights_and_guidance(runs, tmp_path, monkeypatch, capsys) -> None:
    """A line each, against real images; the classifier is trained once, and a second command repeats the numbers."""
    config = settings(tmp_path, f"runs=[{runs['adam']},{runs['splus']}]", "guidance=[1,2]")
    assert measure(config, Console()) == 0
    text = (tmp_path / "sample_quality.csv").read_text()
    *samples, augmented, training, held_out = csv.DictReader(text.splitlines())
    averages = {"adam": ("live", "ema_0.5", "ema_0.9"), "splus": ("averaged",)}
    expected = [(str(runs[name]), w, g) for name in runs for w in averages[name] for g in ("1.0", "2.0")]
    assert [(row["set"], row["weights"], row["guidance"]) for row in samples] == expected
    loss = json.loads((runs["splus"] / "result.json").read_text())["final"]["averaged"]["loss"]
    assert float(samples[-1]["loss"]) == loss
    distances = [float(row["frechet_distance"]) for row in samples]
    assert len(set(distances)) == len(distances)  # no two sets of samples are the same
    assert float(training["frechet_distance"]) < float(augmented["frechet_distance"]) < min(distances)
    assert all(0 <= float(row["class_accuracy"]) <= 1 for row in (*samples, augmented, training, held_out))

    (cached,) = tmp_path.glob("classifier-*")
    monkeypatch.setattr(classifier, "run", lambda config, directory: json.loads((cached / "result.json").read_text()))
    capsys.readouterr()
    measure(config, Console())
    assert "is trained" not in capsys.readouterr().out
    assert (tmp_path / "sample_quality.csv").read_text() == text


def test_training_images_have_the_labels_that_are_asked_for() -> None:
    """One after the other, as training draws them."""
    data = Images(shift=0, flip=False)
    labels = torch.tensor([3] * 300 + [7, 0, 7, 3])
    images = ((training_images(data, labels) + 1) * 127.5).round().byte().flatten(1).numpy()
    originals = dict(zip(map(bytes, data.padded.flatten(1).numpy()), data.labels.tolist()))
    assert [originals[bytes(image)] for image in images] == labels.tolist()


def test_data_without_pixels_or_of_any_size_of_pixels() -> None:
    """Latents are refused; patches fit the images that there are."""

    class Data:
        held_out = range(100)

        def __init__(self, channels: int, side: int) -> None:
            self.sizes = {"channels": channels, "image_size": side, "classes": 10}

    def config(channels: int, side: int) -> DictConfig:
        return classifier.classifier_config(
            ["preset=smoke"], configuration("objective=diffusion").data, Data(channels, side)
        )

    with pytest.raises(SettingError, match="has 4 channels; the classifier needs pixels"):
        config(4, 32)
    assert [config(3, side).model.patch for side in (28, 32, 64, 224, 256)] == [7, 8, 8, 14, 16]


def test_runs_that_cannot_be_measured_are_refused(runs, tmp_path) -> None:
    """By what is wrong with them, before anything is trained."""
    other = tmp_path / "other"
    run(smoke("diffusion", "adam", "steps=5", "data.flip=false", "keep_checkpoint=true"), other, progress=False)
    bare = tmp_path / "bare"
    run(smoke("diffusion", "adam", "steps=5"), bare, progress=False)
    text = tmp_path / "text"
    run(smoke("language_modelling", "adam", "steps=5", "keep_checkpoint=true"), text, progress=False)
    here = runs["adam"]
    for given, message in {
        ("runs=[]",): "give the directories",
        (f"runs={tmp_path}",): "holds no run that has ended",
        (f"runs={text}",): "objective=diffusion",
        (f"runs={bare}",): "keep_checkpoint=true",
        (f"runs=[{here},{other}]",): "differ in data",
        (f"runs={here}", "images=2001"): "only 2000 images are held out",
        (f"runs={here}", "images=32"): "images=32 for 32 features",
        (f"runs={here}", "images=2000", "fid=true"): "images=2000 for 2048 features",
    }.items():
        with pytest.raises(SettingError, match=message):
            measure(settings(tmp_path / "output", *given), Console())
    assert not (tmp_path / "output").exists()


def test_fid_says_how_to_get_what_it_needs(tmp_path, monkeypatch) -> None:
    """The package, or else the file; nothing downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(SettingError, match=r"pip install '\.\[fid\]' with|curl --create-dirs"):
        classifier.inception(torch.device("cpu"))
    assert not any(tmp_path.iterdir())
