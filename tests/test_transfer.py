"""The sweep over widths: which runs it asks for, what it makes of them, and that it goes on where it was stopped."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from runs import ROOT

from benchmarks import optima
from benchmarks.cells import ORIGIN, Cell, Outcome, made_by_other_code
from benchmarks.ledger import Ledger, averaged_loss, read
from benchmarks.lr_transfer import transfer_from
from benchmarks.transfer import Study, Transfer
from benchmarks.transfer_table import (
    CONVERSIONS,
    OPTIMA,
    SLOPES,
    conversions,
    results,
    write_conversions,
    write_optima,
    write_slopes,
)
from splus import lr_from_adam

WIDTHS = (32, 64, 128)


def study(slope: float = 0.0, **options: object) -> Study:
    given = {"objective": "language_modelling", "optimizer": "splus", "settings": ("preset=transfer",)}
    given |= {"knob": "optimizer.lr", "start": 0.25, "seeds": dict.fromkeys(WIDTHS, 2)}
    return Study(**given | options)  # type: ignore[arg-type]


def loss_of(cell: Cell, slope: float) -> float:
    """A parabola in log2(lr) whose minimum moves by ``slope`` a doubling from 0.25 at width 32, and less by width."""
    width = cell.group.rpartition("/")[2]
    lr, seed = (float(setting.partition("=")[2]) for setting in cell.overrides[-2:])
    best = -2 + slope * math.log2(int(width) / 32)
    return 2 - math.log2(int(width)) / 10 + 0.1 * (math.log2(lr) - best) ** 2 + seed / 100


def outcome(cell: Cell, loss: float) -> Outcome:
    final = {"live": {"loss": loss + 0.5}, "averaged": {"loss": loss}}
    status = "finished" if math.isfinite(loss) else "diverged"
    result = {"status": status, "step": 5, "seconds": 1.25, "final": final if status == "finished" else {}}
    return Outcome(Path("nowhere") / cell.name, status, 1.25, result)


def run_all(transfer: Transfer, slope: float, diverged_from: float = math.inf) -> dict[Cell, Outcome]:
    outcomes: dict[Cell, Outcome] = {}
    while new := [cell for cell in transfer.wanted(outcomes) if cell not in outcomes]:
        for cell in new:
            lr = float(cell.overrides[-2].partition("=")[2])
            outcomes[cell] = outcome(cell, loss_of(cell, slope) if lr < diverged_from else math.inf)
    return outcomes


@pytest.mark.parametrize("slope", [0.0, -1.0, 0.5])
def test_a_drift_is_found_and_its_cost(slope: float) -> None:
    """Optima, slope and the loss at the narrowest width's rate are those of the curves that were run."""
    transfer = Transfer((study(),), limit=12)
    (result,) = results(transfer, run_all(transfer, slope))
    assert list(result.optima) == list(WIDTHS)
    for doubling, (width, best) in enumerate(result.optima.items()):
        assert best.by_seed == pytest.approx([-2 + slope * doubling] * 2, abs=1e-3)  # rates have four digits
        assert best.bracketed
        off = 0.1 * (slope * doubling) ** 2
        assert result.transfer[width] - result.best[width] == pytest.approx(off, abs=1e-3)
        for index, cost in result.costs[width].items():
            off = 0.1 * (index / 2 - best.octaves) ** 2 - 0.1 * (best.index / 2 - best.octaves) ** 2
            assert cost * result.best[width] == pytest.approx(off, abs=2e-2 * off + 1e-3)
    assert result.slope is not None
    assert result.slope.value == pytest.approx(slope, abs=1e-3)


def test_diverged_transfer_is_shown_as_such() -> None:
    """Where the narrow rate diverges at a wide network, its cost is infinite; a diverged neighbour brackets."""
    transfer = Transfer((study(),), limit=12)
    outcomes = run_all(transfer, slope=-2.0)
    for cell in outcomes:
        lr, width = float(cell.overrides[-2].partition("=")[2]), int(cell.group.rpartition("/")[2])
        if width == 128 and lr > 0.2:
            outcomes[cell] = outcome(cell, math.inf)
    (result,) = results(transfer, outcomes)
    assert result.cost(128) == math.inf
    assert result.optima[128].bracketed


def test_an_optimum_at_the_edge_is_flagged(tmp_path: Path) -> None:
    """A search that its limit ends is not bracketed, in the table as well."""
    transfer = Transfer((study(start=64.0),), limit=4)
    found = results(transfer, run_all(transfer, slope=0.0))
    write_optima(found, tmp_path / "optima.csv")
    rows = list(csv.DictReader((tmp_path / "optima.csv").open()))
    assert rows[0]["bracketed"] == "false"


def test_a_wider_network_is_searched_from_the_narrower_ones_best() -> None:
    """With the optimum in its place three octaves away, only the narrowest width has to look for it."""
    transfer = Transfer((study(start=0.25 / 8, seeds=dict.fromkeys(WIDTHS, 1)),), limit=12)
    outcomes = run_all(transfer, slope=0.0)
    counts = {width: sum(cell.group.endswith(f"/{width}") for cell in outcomes) for width in WIDTHS}
    assert counts[32] > counts[64] == counts[128] == 5


def test_csv_files_have_the_stated_columns(tmp_path: Path) -> None:
    transfer = Transfer((study(), study(optimizer="adam", knob="optimizer.lr")), limit=12)
    found = results(transfer, run_all(transfer, slope=-0.5))
    write_optima(found, tmp_path / "optima.csv")
    write_slopes(found, tmp_path / "slopes.csv")
    with (tmp_path / "optima.csv").open() as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == OPTIMA
    assert len(rows) == 1 + 2 * len(WIDTHS)
    with (tmp_path / "slopes.csv").open() as file:
        slopes = list(csv.DictReader(file))
    assert tuple(slopes[0]) == SLOPES
    assert [row["optimizer"] for row in slopes] == ["splus", "adam"]
    assert float(slopes[0]["slope"]) == pytest.approx(-0.5, abs=1e-3)


def test_adams_best_rates_are_converted_and_run(tmp_path: Path) -> None:
    """SPlus runs, with every seed, at the rate nearest to the one that lr_from_adam gives; the table has its loss."""
    transfer = Transfer((study(), study(optimizer="adam")), limit=12)
    outcomes = run_all(transfer, slope=0.0)
    found = conversions(transfer, outcomes)
    assert [row.width for row in found] == list(WIDTHS)
    for row in found:
        assert row.adam_lr == pytest.approx(0.25, abs=1e-3)
        assert row.lr == pytest.approx(lr_from_adam(row.adam_lr, row.width))
        off = optima.nearest_index(row.lr) / 2 + 2
        assert row.loss - row.best_loss == pytest.approx(0.1 * off**2, abs=1e-3)  # rates have four digits
    write_conversions(found, tmp_path / "conversion.csv")
    with (tmp_path / "conversion.csv").open() as file:
        assert tuple(next(csv.reader(file))) == CONVERSIONS


def test_nothing_is_converted_without_adam() -> None:
    transfer = Transfer((study(), study(optimizer="adam", objective="diffusion")), limit=12)
    assert conversions(transfer, run_all(transfer, slope=0.0)) == []


class Silent:
    def ended(self, *_: object) -> None: ...
    def update(self, *_: object) -> None: ...


def test_a_ledger_stands_for_the_runs_it_lists(tmp_path: Path) -> None:
    """Read back, it has the losses of every run that ended; one that crashed is not in it and will run again."""
    transfer = Transfer((study(),), limit=12)
    outcomes = run_all(transfer, slope=0.0, diverged_from=0.6)
    cells = list(outcomes)
    outcomes[cells[0]] = Outcome(Path("nowhere"), "crashed", 1.0, {}, "an error")
    ledger = Ledger(tmp_path / "runs.csv", transfer.labels, Silent())
    for cell in cells:
        ledger.ended(cell, outcomes[cell], earlier=False)
        ledger.ended(cell, outcomes[cell], earlier=True)
    known = read(tmp_path / "runs.csv")
    assert set(known) == {cell.hash for cell in cells[1:]}
    for cell in cells[1:]:
        again, loss = known[cell.hash], averaged_loss(outcomes[cell])
        assert again.status == outcomes[cell].status
        assert averaged_loss(again) == loss
    with (tmp_path / "runs.csv").open() as file:
        first = next(csv.DictReader(file))
    assert first["setting"] == "optimizer.lr"
    assert {first["width"], first["seed"]} <= {"32", "64", "128", "0", "1"}


def test_a_ledger_says_by_what_a_run_was_begun_not_by_what_it_is_written(tmp_path: Path) -> None:
    """As of a job on another machine, or of one that ended while its command was stopped and the code then edited."""
    transfer = Transfer((study(),), limit=12)
    (cell, outcome), *_ = run_all(transfer, slope=0.0).items()
    begun = {"code": "0" * 12, "torch": "2.6.0", "machine": "another"}
    run = replace(outcome, directory=tmp_path / "run")
    run.directory.mkdir()
    (run.directory / ORIGIN).write_text(json.dumps(begun))
    Ledger(tmp_path / "runs.csv", transfer.labels, Silent()).ended(cell, run, earlier=True)
    with (tmp_path / "runs.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert line | begun == line
    assert made_by_other_code(run)


def test_rates_are_half_octaves() -> None:
    cell = study().cell(64, optima.nearest_index(0.25), seed=3)
    assert cell.overrides[-3:] == ("model.width=64", "optimizer.lr=0.25", "seed=3")


SMALL = ["preset=smoke", "workers=2"]


def sweep(output: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.lr_transfer", *SMALL, f"output={output}", *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_runs_and_goes_on_from_its_runs_csv(tmp_path: Path) -> None:
    """A second command with nothing but the list of runs has the same results: it runs nothing, as told."""
    first = sweep(tmp_path / "a")
    assert first.returncode == 0, first.stderr + first.stdout
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"runs.csv", "optima.csv", "slopes.csv", "conversion.csv", "report.html", "figures", "cells"}
    (tmp_path / "b").mkdir()
    runs = (tmp_path / "a" / "runs.csv").read_text()
    (tmp_path / "b" / "runs.csv").write_text(runs)
    second = sweep(tmp_path / "b", "report_only=true")
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "b" / "runs.csv").read_text() == runs
    for name in ("optima.csv", "slopes.csv"):
        assert (tmp_path / "b" / name).read_text() == (tmp_path / "a" / name).read_text()


def test_an_unknown_optimizer_is_refused(tmp_path: Path) -> None:
    done = sweep(tmp_path, "studies.text.optimizers=[sgdd]")
    assert done.returncode == 2
    assert "optimizer sgdd is unknown; known are splus" in done.stdout
    done = sweep(tmp_path, "only=[texts]")
    assert done.returncode == 2
    assert "only=texts is no study; studies are text" in done.stdout


@pytest.mark.parametrize("preset", sorted(path.stem for path in (ROOT / "conf" / "transfer" / "preset").iterdir()))
def test_every_run_of_a_preset_has_a_configuration(preset: str) -> None:
    """The settings of each of its optimizers fit its training."""
    with initialize_config_dir(str(ROOT / "conf" / "transfer"), version_base="1.3"):
        transfer = transfer_from(compose("lr_transfer", overrides=[f"preset={preset}"]))
    cells = {tuple(cell.group.split("/")[:2]): cell for cell in transfer.wanted({})}
    assert set(cells) == {(study.objective, study.optimizer) for study in transfer.studies}
    assert all(cell.config.optimizer for cell in cells.values())
