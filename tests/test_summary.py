"""The numbers of a comparison as files, from runs whose losses are made up so that the right answers are known."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.cells import Cell, Outcome
from benchmarks.comparison import Comparison, Condition, Study, Training
from benchmarks.methods import Method, Row
from benchmarks.summary import write_differences, write_summary
from benchmarks.table import Entry, entries

TRAINING = Training("smoke", (), {}, {}, Path("cells"))
STEPS = 12  # of the preset smoke


def study(name: str, schedule: str, seeds: int, budgets: tuple[float, ...] = ()) -> Study:
    method = Method(name, (f"optimizer={name}",), (Row(name, name, "live"),), {"diffusion": 0.1})
    return Study(Condition("diffusion", schedule=schedule), method, TRAINING, 1, seeds, False, budgets)


def rows(studies: Sequence[Study], final: Callable[[str, int, int], float]) -> dict[str, Entry]:
    """The rows by name. ``final``: the loss at the end of a run, of the optimizer, its steps and its seed."""
    outcomes: dict[Cell, Outcome] = {}
    comparison = Comparison(tuple(studies))
    while new := [cell for cell in comparison.wanted(outcomes) if cell not in outcomes]:
        for cell in new:
            name, steps = cell.group.split("/")[1], int(cell.config.steps)
            loss = final(name, steps, cell.config.seed)
            curves = {"live": [[0, steps], [0.0, 0.1 * steps], [2.0, loss]]}
            result = {"status": "finished", "final": {"live": {"loss": loss}}, "curves": curves}
            outcomes[cell] = Outcome(Path(cell.name), "finished", 1.0, result)
    return {entry.row.name: entry for entry in entries(comparison, outcomes)}


def test_the_summary_has_its_columns_and_no_mean_of_some_seeds(tmp_path: Path) -> None:
    """SPlus is at Adam's 1.0 with half of the steps; Muon with one seed of two, so that it has no number."""
    finals = {"adam": (1.0, 1.0), "splus": (0.0, 0.0), "muon": (0.5, 1.5)}
    found = rows([study(name, "constant", 2) for name in finals], lambda name, steps, seed: finals[name][seed])
    write_summary(list(found.values()), TRAINING, tmp_path / "summary.csv")
    text = (tmp_path / "summary.csv").read_text().splitlines()
    assert text[0] == (
        "objective,start,optimizer,schedule,batch_size,learning_rate,seeds,final_loss,sta,sta_low,sta_high,"
        "tta,tta_low,tta_high,status"
    )
    table = {line["optimizer"]: line for line in csv.DictReader(text)}
    assert text[2] == "diffusion,initialisation,splus,constant,16,0.1,2,0,0.5,0.5,0.5,0.5,0.5,0.5,reached"
    assert (table["muon"]["sta"], table["muon"]["sta_low"], table["muon"]["status"]) == ("", "", "> budget")
    assert table["adam"]["status"] == "reached"


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """Seeds that are hard for both leave no trace in the difference."""
    found = rows([study(name, "constant", 3) for name in ("adam", "splus")], lambda name, _, seed: HARD[name][seed])
    write_differences(list(found.values()), tmp_path / "differences.csv")
    with open(tmp_path / "differences.csv") as file:
        table = {(line["optimizer"], line["other"]): line for line in csv.DictReader(file)}
    line = table["splus", "adam"]
    assert (float(line["difference"]), line["pairs"]) == (pytest.approx(-0.2), "3")
    assert -0.23 < float(line["low"]) < -0.2 < float(line["high"]) < -0.17
    assert float(table["adam", "splus"]["difference"]) == pytest.approx(0.2)


def test_a_target_below_the_shortest_run_is_on_the_line_from_where_all_begin() -> None:
    """And not at the end of the shortest run, which ends at 0.5 when Adam ends at 1.0."""
    studies = [study("adam", "linear_decay", 1), study("splus", "linear_decay", 1, (0.25, 0.5))]
    ends = {3: 0.5, 6: 0.4, STEPS: 0.3}
    splus = rows(studies, lambda name, steps, seed: 1.0 if name == "adam" else ends[steps])["splus"]
    begin = splus.curves[0]
    assert begin is not None
    assert begin.steps == (0, 3, 6, STEPS)
    assert splus.steps.mean == pytest.approx(3 * (begin.losses[0] - 1.0) / (begin.losses[0] - 0.5) / STEPS)


HARD = {"adam": (1.0, 2.0, 3.0), "splus": (0.8, 1.81, 2.79)}


def test_under_a_schedule_judged_at_its_end_a_curve_is_of_the_ends_of_shorter_runs() -> None:
    """SPlus ends at 1.3 and 0.8 with a quarter and half of the steps: at Adam's 1.0 with 0.4 of them."""
    studies = [study("adam", "linear_decay", 1), study("splus", "linear_decay", 1, (0.25, 0.5))]
    ends = {3: 1.3, 6: 0.8, STEPS: 0.5}
    splus = rows(studies, lambda name, steps, seed: 1.0 if name == "adam" else ends[steps])["splus"]
    assert splus.steps.mean == pytest.approx((3 + 3 * 0.3 / 0.5) / STEPS)
    assert splus.time.mean == pytest.approx(splus.steps.mean)
    assert splus.loss.mean == 0.5
