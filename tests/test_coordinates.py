"""The coordinate check: slopes of models whose answer is known, and the command that judges by them."""

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from runs import ROOT
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from splus import CoordinateCheck, SPlus, coordinate_check, param_groups

WIDTHS = (16, 32, 64, 128)


class MLP(nn.Module):
    """Frozen inputs, two hidden layers, one output; ``alpha`` is the power of width in the initial scale."""

    def __init__(self, width: int, alpha: float = 0.0) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(32, width, bias=False), nn.Linear(width, 1, bias=False)
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        for layer in (self.inputs, self.first, self.second, self.outputs):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5 * width**alpha)
        self.inputs.weight.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:  # (B, 32)
        return self.outputs(self.second(self.first(self.inputs(x).sin()).tanh()).tanh())


def square(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def batch() -> Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def check(make: Callable[[nn.Module], Optimizer], **options: int) -> CoordinateCheck:
    return coordinate_check(MLP, batch(), WIDTHS, make, loss=square, **options)


def test_the_shape_scale_takes_a_power_of_the_width_off_the_changes() -> None:
    """Of square layers, at rates so small that a change is linear in its rate: the slope is 1 less than without."""

    def changes(scale: str) -> dict[str, float]:
        checked = check(lambda model: SPlus(param_groups(model), 1e-6, step_scale=scale), steps=1)
        assert checked.hidden == {"first", "second"}
        return {name: checked.slopes()[name][1] for name in checked.hidden}

    scaled, unscaled = changes("shape"), changes("none")
    for name in scaled:
        assert unscaled[name] - scaled[name] == pytest.approx(1, abs=1e-4)


def test_failures_are_the_hidden_layers_beyond_the_tolerance() -> None:
    """Adam with one rate for all widths fails; with its rate over the width the hidden layers move alike."""
    failing = check(lambda model: Adam(model.parameters(), 1e-3))
    assert set(failing.failures(0.5)) == {"first", "second"}
    passing = check(lambda model: Adam(model.parameters(), 0.03 / model.first.in_features), steps=2)
    assert passing.failures(0.4) == {}


def test_activations_that_follow_the_width_are_seen_without_training() -> None:
    """At a rate of 0 nothing changes, and the scale of the initial weights is the slope: exactly w^(1/4) a layer."""
    checked = coordinate_check(
        lambda width: MLP(width, 0.25), batch(), WIDTHS, lambda m: SGD(m.parameters(), 0.0), loss=square, seeds=2
    )
    slopes = checked.slopes()
    assert slopes["inputs"][0] == pytest.approx(0.25, abs=0.1)
    assert all(math.isnan(change) for _, change in slopes.values())
    assert set(checked.failures()) == {"first", "second"}  # a layer that does not move does not pass


def test_measures_are_root_mean_squares() -> None:
    """Of the output after one step of plain descent, and of its difference from before."""
    torch.manual_seed(0)
    model = MLP(16)
    x = batch()
    before = model.first(model.inputs(x).sin()).detach()
    square(model, x).backward()
    with torch.no_grad():
        model.first.weight -= 0.1 * model.first.weight.grad
        after = model.first(model.inputs(x).sin())
    checked = check(lambda m: SGD(m.parameters(), 0.1), steps=1, seeds=1)
    assert checked.activations["first"][0] == [pytest.approx(float(after.square().mean().sqrt()), rel=1e-5)]
    assert checked.changes["first"][0] == [pytest.approx(float((after - before).square().mean().sqrt()), rel=1e-5)]


def test_the_loss_may_be_the_models_own() -> None:
    """A model that returns its loss, or something that has one, is called with the batch as it is."""

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class OwnLoss(MLP):
        def forward(self, x: Tensor, wrapped: bool = False) -> Tensor:
            loss = super().forward(x).square().mean()
            return Output(loss) if wrapped else loss  # type: ignore[return-value]

    results = [
        coordinate_check(OwnLoss, given, (16, 32), lambda m: SGD(m.parameters(), 0.1), seeds=1)
        for given in (batch(), (batch(),), {"x": batch(), "wrapped": True})
    ]
    assert results[0].changes["first"] == results[1].changes["first"] == results[2].changes["first"]
    with pytest.raises(ValueError, match="give loss="):
        coordinate_check(MLP, batch(), (16, 32), lambda m: SGD(m.parameters(), 0.1))


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="needs two different ones"):
        check_widths((64, 64))

    def uneven(width: int) -> nn.Module:
        return MLP(width) if width == 16 else nn.Sequential(MLP(width))

    with pytest.raises(ValueError, match="do not all have the modules"):
        coordinate_check(uneven, batch(), (16, 32), lambda m: SGD(m.parameters(), 0.1), loss=square)


def check_widths(widths: tuple[int, ...]) -> CoordinateCheck:
    return coordinate_check(MLP, batch(), widths, lambda m: SGD(m.parameters(), 0.1), loss=square)


def test_it_prints_a_line_a_module() -> None:
    lines = str(check(lambda model: SPlus(param_groups(model), lr=0.1), seeds=1)).splitlines()
    assert len(lines) == 1 + len(list(MLP(16).named_modules()))
    assert any(line.startswith("first *") for line in lines)


@pytest.mark.parametrize(("tolerance", "code"), [(10.0, 0), (1e-6, 1)])
def test_the_command_fails_when_a_hidden_layer_does(tolerance: float, code: int, tmp_path) -> None:
    settings = ["widths=[16,32]", "steps=2", "seeds=1", f"tolerance={tolerance}", f"output={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.coordinate_check", *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "150"},
    )
    assert done.returncode == code, done.stderr
    assert "mlp.expand *" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["coordinate_check.csv", "coordinate_check.png"]
