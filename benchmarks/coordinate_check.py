"""How far every module's output moves in the first steps, against width: the check of how learning rates carry over.

    python -m benchmarks.coordinate_check                                    (settings: conf/coordinates/)
    python -m benchmarks.coordinate_check optimizer=adam objective=image_classification

The exit code is 1 when a hidden layer's slope is beyond the tolerance. For a model of your own:
:func:`splus.coordinate_check`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
import matplotlib
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Generator, nn
from torch.optim import Optimizer

from benchmarks.cells import ROOT, compose_config
from benchmarks.csv_file import write_csv
from benchmarks.figures import STYLE, save_png
from splus import CoordinateCheck, coordinate_check
from train.config import build
from train.optimizers import build_optimizer


@hydra.main(config_path=str(ROOT / "conf" / "coordinates"), config_name="coordinate_check", version_base="1.3")
def main(config: DictConfig) -> None:
    sys.exit(check(config, Console()))


def check(config: DictConfig, console: Console) -> int:
    """Measure, print and write the slopes; the exit code."""
    checked = measured(config)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    write_csv(rows(checked), output / "coordinate_check.csv")
    with matplotlib.rc_context(STYLE):
        save_png(draw(checked), output / "coordinate_check.png")
    console.print(table(checked, config.tolerance))
    failures = checked.failures(config.tolerance)
    if failures:
        console.print(f"[red]Beyond ±{config.tolerance}:[/] {', '.join(failures)}", highlight=False, soft_wrap=True)
    console.print(f"Written to {output}: coordinate_check.csv, coordinate_check.png", highlight=False, soft_wrap=True)
    return int(bool(failures))


def measured(config: DictConfig) -> CoordinateCheck:
    """The check of a training configuration, its models drawn from the seeds that torch has at the time."""
    settings = ("preset=transfer", f"objective={config.objective}", f"optimizer={config.optimizer}", *config.settings)
    whole = compose_config(settings)
    data = build(whole.data)
    objective = build(whole.objective, data, 1, torch.device("cpu"))
    batch = objective.batch(config.batch_size, Generator().manual_seed(0))

    def make_model(width: int) -> nn.Module:
        sized = compose_config((*settings, f"model.width={width}"))
        model: nn.Module = build(sized.model, **data.sizes, generator=Generator().manual_seed(torch.initial_seed()))
        return model

    def make_optimizer(model: nn.Module) -> Optimizer:
        return build_optimizer(whole.optimizer, model)

    return coordinate_check(
        make_model,
        batch,
        list(config.widths),
        make_optimizer,
        loss=objective.loss,
        steps=config.steps,
        seeds=config.seeds,
    )


def table(checked: CoordinateCheck, tolerance: float) -> Table:
    """A line a module: the slopes, and the changes at the narrowest and the widest."""
    first, last = checked.widths[0], checked.widths[-1]
    shown = Table("module", "activation", "change", f"change, width {first}", f"width {last}", box=box.SIMPLE_HEAD)
    shown.caption = "slopes of log RMS on log width, over all steps; * hidden; red beyond the tolerance"
    for name, slopes in checked.slopes().items():
        texts = [f"{slope:+.2f}" for slope in slopes]
        if name in checked.hidden:
            texts = [f"[red]{t}[/]" if not abs(s) <= tolerance else t for t, s in zip(texts, slopes)]
        ends = [f"{rms[-1]:.3g}" for rms in (checked.changes[name][0], checked.changes[name][-1])]
        shown.add_row((name or "the model") + (" *" if name in checked.hidden else ""), *texts, *ends)
    return shown


def rows(checked: CoordinateCheck) -> list[dict[str, Any]]:
    """One for each module, width and step."""
    return [
        {
            "module": name, "hidden": name in checked.hidden, "width": width, "step": step,
            "activation_rms": activation, "change_rms": change,
        }
        for name, changes in checked.changes.items()
        for width, activations, of_width in zip(checked.widths, checked.activations[name], changes)
        for step, (activation, change) in enumerate(zip(activations, of_width), 1)
    ]  # fmt: skip


def draw(checked: CoordinateCheck) -> Figure:
    """RMS of the outputs and of their changes against width, a line a module, after the last step."""
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, rms, heading in zip(panels, (checked.activations, checked.changes), ("RMS of outputs", "RMS of changes")):
        axes.set_title(f"{heading} after the last step")
        axes.set_xlabel("width")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for name, of_widths in rms.items():
            hidden = name in checked.hidden
            axes.plot(
                checked.widths,
                [of_width[-1] for of_width in of_widths],
                "o-" if hidden else ":",
                ms=4,
                label=name if hidden else None,
            )
    panels[0].legend(title="hidden layers; others dotted", fontsize=7)
    return figure


if __name__ == "__main__":
    main()
