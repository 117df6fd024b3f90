"""The tables and the report, from runs whose curves are made up so that the right answers are known."""

import base64
import csv
import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from omegaconf import OmegaConf
from rich.console import Console

from benchmarks import bracket
from benchmarks.cells import ROOT, Cell, Outcome
from benchmarks.command import SettingError
from benchmarks.compare import SETTINGS, comparison_from
from benchmarks.comparison import Comparison
from benchmarks.estimates import estimate
from benchmarks.figures import PALETTE, Span, draw_ratios, looks
from benchmarks.ledger import Ledger
from benchmarks.methods import LIVE, Row
from benchmarks.progress import Progress
from benchmarks.report import Results, load, main, write_report
from benchmarks.sections import curve_table, rate_table, winners
from benchmarks.steps_to_adam import Curve
from benchmarks.summary import headline, write_details, write_summary
from benchmarks.table import Entry, entries, notes, terminal_tables

STEPS = tuple(range(0, 101, 10))
OBJECTIVES = ("image_classification", "diffusion")
COMMAND = "python -m benchmarks.compare preset=smoke seeds=2"


def straight(final: float) -> list[float]:
    """Losses that fall in a straight line from 2 to `final`."""
    return [2 - (2 - final) * step / 100 for step in STEPS]


def ended(directory: Path, pace: float, losses: Mapping[str, list[float]], status: str = "finished") -> Outcome:
    """What a run comes to. `pace`: seconds a step."""
    seconds = [pace * step for step in STEPS]
    result = {
        "status": status,
        "step": 100,
        "seconds": seconds[-1],
        "final": {weights: {"loss": of[-1], "accuracy": 0.9} for weights, of in losses.items()},
        "state_bytes": int(1e7 * pace),
        "curves": {weights: [list(STEPS), seconds, of] for weights, of in losses.items()},
    }
    return Outcome(directory, status, seconds[-1], result)


def run_of(comparison: Comparison, cell: Cell, root: Path) -> Outcome:
    """Adam ends at 1.0 and its averages at 0.9; SPlus is at 1.0 halfway, at twice the time a step."""
    study = next(study for study in comparison.studies if study.group == cell.group)
    first, settings = study.first_index({}), dict(setting.split("=", 1) for setting in cell.overrides)
    assert first is not None
    index, directory = bracket.nearest_index(float(settings["optimizer.lr"])) - first, cell.directory(root)
    worse = 0.2 * abs(index)
    if cell.group.endswith("adam"):
        averages = {"ema_0.5": straight(1.2), "ema_0.9": straight(0.9 + worse)}
        return ended(directory, 0.1, {"live": straight(1 + worse), **averages})
    if cell.group == "image_classification/splus":
        return ended(directory, 0.2, {"live": straight(1.2 + worse), "averaged": straight(worse)})
    if index == 0:
        return Outcome(directory, "crashed", 1.0, {}, "Traceback\nValueError: no <luck>\n")
    if index == 1:
        return ended(directory, 0.2, {}, "diverged")
    return ended(directory, 0.2, {"live": straight(1.5), "averaged": straight(1.1 if settings["seed"] == "1" else 0.5)})


def leave(folder: Path, objectives: Sequence[str] = OBJECTIVES) -> None:
    """Makes `folder` what benchmarks.compare would have left of these runs."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf" / "comparison"), version_base="1.3"):
        overrides = [f"objectives=[{','.join(objectives)}]", "preset=smoke", "seeds=2", "rates=3", f"output={folder}"]
        config = compose("compare", overrides=overrides)
    comparison = comparison_from(config)
    folder.mkdir(parents=True)
    (folder / SETTINGS).write_text(f"# {COMMAND}\n{OmegaConf.to_yaml(config, resolve=True)}")
    watcher = Progress(Console(quiet=True), 1, lambda _: {})
    ledger = Ledger(folder / "runs.csv", lambda cell: {"run": cell.name}, watcher, curves=True)
    known: dict[Cell, Outcome] = {}
    while new := [cell for cell in comparison.wanted(known) if cell not in known]:
        for cell in new:
            known[cell] = outcome = run_of(comparison, cell, folder / "cells")
            ledger.ended(cell, outcome, earlier=False)
            if outcome.error:
                outcome.directory.mkdir(parents=True)
                (outcome.directory / "error.txt").write_text(outcome.error)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of a folder that has been moved since."""
    folder = tmp_path_factory.mktemp("results")
    leave(folder / "made")
    (folder / "made").rename(folder / "moved")
    found = load(folder / "moved")
    (best := found.rows[2].outcomes[0].directory).mkdir(parents=True)
    (best / "samples.png").write_bytes(b"not really an image")
    return found


@pytest.fixture(scope="module")
def rows(results: Results) -> list[Entry]:
    return list(results.rows)


@pytest.fixture(scope="module")
def report(results: Results) -> Path:
    return write_report([results], results.folder / "report.html")


def test_ratios_are_those_of_the_curves(rows: list[Entry]) -> None:
    adam, ema, splus, live = rows[:4]
    assert [entry.row.name for entry in rows[:4]] == ["adam", "adam_ema", "splus", "splus_live"]
    assert (adam.steps.mean, adam.time.mean, adam.steps_ema.missing) == (1.0, 1.0, 2)  # 0.9 is never reached by Adam
    assert adam.steps_ema.mean != adam.steps_ema.mean  # no number, rather than a wrong one
    assert ema.steps.mean == pytest.approx(1 / 1.1)  # from 2 to 0.9, the target 1.0
    assert ema.steps_ema.mean == 1.0
    assert splus.steps.mean == pytest.approx(0.5)
    assert splus.time.mean == pytest.approx(1.0)
    assert splus.steps_ema.mean == pytest.approx(0.55)
    assert live.steps.missing == 2
    assert (splus.step_seconds, splus.step_ratio) == (pytest.approx(0.2), pytest.approx(2.0))
    assert (ema.choice.weights, splus.state_bytes) == ("ema_0.9", 2_000_000)


def test_seeds_that_do_not_reach_the_target_are_counted(rows: list[Entry]) -> None:
    splus = rows[6]
    assert (splus.row.name, splus.steps.missing, splus.steps.total) == ("splus", 1, 2)
    assert splus.steps.mean == pytest.approx(1 / 1.5)
    assert "SPlus does not reach Adam's final loss within Adam's steps with 1 of 2 seeds" in headline(rows)[1]


def test_rates_that_are_not_bracketed_are_named_with_the_reason(rows: list[Entry]) -> None:
    assert [entry.choice.bracketed for entry in rows] == [True, True, True, True, True, True, False, False]
    assert notes(rows) == ["* Diffusion: best rate not bracketed (a neighbour crashed): SPlus, SPlus (live)"]


def test_the_terminal_table_fits_80_columns(rows: list[Entry]) -> None:
    console = Console(width=80, record=True, quiet=False)
    for table in terminal_tables(rows):
        console.print(table)
    text = console.export_text()
    assert "0.50" in text
    assert "…" not in text


def test_csv_files_have_a_line_a_row(results: Results, tmp_path: Path) -> None:
    write_summary(results.rows, results.comparison.studies[0].training, tmp_path / "summary.csv")
    write_details(results.rows, tmp_path / "details.csv")
    for name in ("summary.csv", "details.csv"):
        with open(tmp_path / name) as file:
            table = list(csv.DictReader(file))
        assert [(line["objective"], line["optimizer"]) for line in table] == [
            (entry.condition.objective, entry.row.name) for entry in results.rows
        ]
    with open(tmp_path / "summary.csv") as file:
        table = list(csv.DictReader(file))
    assert float(table[2]["sta"]) == pytest.approx(0.5)
    assert (table[6]["sta"], table[6]["status"]) == ("", "> budget")  # no mean of some seeds


def test_the_winner_of_each_measure_is_named_with_its_lead(rows: list[Entry]) -> None:
    steps, _, loss = winners(rows[:4])
    assert (steps["label"], steps["number"], steps["next"][:22]) == ("SPlus", "0.50", "next: Adam + EMA, 0.91")
    assert "a clear lead: -0.41" in steps["next"]  # the made-up seeds are alike
    assert (loss["label"], loss["number"]) == ("SPlus", "0.000")
    with_a_seed_missing, time, _ = winners(rows[4:])
    assert (with_a_seed_missing["label"], time["label"]) == ("Adam + EMA", "Adam + EMA")


def test_tables_of_the_figures_have_their_values(results: Results) -> None:
    curves = curve_table(results.rows[:4])
    assert curves["headings"] == ("step", "Adam", "Adam + EMA", "SPlus", "SPlus (live)")
    assert curves["rows"][5] == ("50", ["1.5000", "1.4500", "1.0000", "1.6000"])
    condition = results.comparison.conditions[1]
    table = rate_table({row: study.swept(row, results.outcomes) for study, row in results.comparison.rows(condition)})
    splus = [cells[table["headings"].index("SPlus") - 1] for _, cells in table["rows"]]
    assert [text for text in splus if text != "–"] == ["0.5000", "crashed", "diverged"]


class Page(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def check_page(text: str, figures: int) -> None:
    """One file; every figure and table says what it shows, headings are in order."""
    elements = Page(text).elements
    for tag, attributes in elements:
        assert tag != "iframe"
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or attributes.get("xlink:href") or "#").startswith(("#", "data:,"))
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    says = [str(attributes.get("aria-label")) for tag, attributes in elements if tag == "svg"]
    assert len(says) == figures
    assert all(": " in text for text in says)
    tags = [tag for tag, _ in elements]
    assert tags.count("table") == tags.count("caption")
    assert all(attributes.get("scope") for tag, attributes in elements if tag == "th")
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_report_is_one_file_for_light_dark_and_small_screens(report: Path) -> None:
    text = report.read_text()
    check_page(text, figures=2 * 4)
    drawn = "".join(re.findall(r"<svg viewBox.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"url\((?!#)", drawn)
    assert not re.search(r"#(?!ffffff)[0-9a-f]{6}\b", drawn)  # every colour follows the page
    assert '<meta name="viewport"' in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_the_report_shows_samples_and_crashes(report: Path) -> None:
    text = report.read_text()
    assert base64.b64encode(b"not really an image").decode() in text
    assert re.search(r"1 run\s+crashed: diffusion-splus-lr[0-9.]+-seed0", text)
    assert "ValueError: no &lt;luck&gt;" in text
    assert "python -m train objective=diffusion preset=smoke schedule=constant optimizer=splus" in text
    assert COMMAND in text


def test_every_figure_is_also_a_png(report: Path) -> None:
    names = {path.stem for path in (report.parent / "figures").glob("*.png")}
    kinds = ("ratios", "steps", "seconds", "learning_rate")
    assert names == {f"{objective}-{kind}" for objective in OBJECTIVES for kind in kinds}


def test_several_folders_make_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path / "one", OBJECTIVES[:1])
    output = tmp_path / "both.html"
    with pytest.raises(SystemExit) as code:
        main([str(tmp_path / "one"), str(tmp_path / "one"), "--output", str(output)])
    assert code.value.code == 0
    assert str(output) in capsys.readouterr().out
    check_page(output.read_text(), figures=2 * 4)


def test_a_folder_without_a_comparison_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=f"{tmp_path} given, which has no comparison.yaml"):
        load(tmp_path)
    (tmp_path / SETTINGS).write_text("preset: smoke\n")
    with pytest.raises(SettingError, match="is of another version"):
        load(tmp_path)


def test_nothing_to_show_is_shown_as_nothing(results: Results, tmp_path: Path) -> None:
    crashed = Outcome(tmp_path / "cells" / "gone", "crashed", 1.0, {}, "MemoryError\n")
    comparison = Comparison(results.comparison.under(results.comparison.conditions[0]))
    known: dict[Cell, Outcome] = {}
    while new := [cell for cell in comparison.wanted(known) if cell not in known]:
        known |= dict.fromkeys(new, crashed)
    rows = entries(comparison, known)
    assert all(entry.lr is None and math.isnan(entry.steps.mean) for entry in rows)
    nothing = Results(tmp_path, results.config, comparison, known, rows, "", {})
    check_page(write_report([nothing], tmp_path / "report.html").read_text(), figures=4)
    assert [line.split(": ")[1] for line in headline(rows)] == ["no run to compare with"]


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_text_and_lines_stand_out_in_both_themes(report: Path) -> None:
    themes = re.findall(r":root \{(.*?)\}", report.read_text(), flags=re.DOTALL)[:2]
    for theme in themes:
        color = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", theme))
        for ground in (color["paper"], color["panel"]):
            assert all(contrast(color[name], ground) >= 4.5 for name in ("ink", "soft", "warn", "focus"))
            assert all(contrast(color[name], ground) >= 3 for name in PALETTE)  # WCAG 2.1, 1.4.11


def test_the_mean_of_curves_is_over_the_evaluations_that_all_of_them_have() -> None:
    """A run of one seed may have no such evaluation, when its shorter run has crashed."""
    full, other = Curve((0, 3, 6), (0.0, 3.0, 6.0), (2.0, 1.5, 1.0)), Curve((0, 6), (0.0, 8.0), (4.0, 2.0))
    for curves in ([full, other], [other, None, full]):
        span = Span.of(curves)
        assert span is not None
        assert span.mean == Curve((0, 6), (0.0, 7.0), (3.0, 1.5))
        assert (span.low, span.high) == ((2.0, 1.0), (4.0, 2.0))


def test_texts_of_the_ratios_lie_inside_and_apart(rows: list[Entry]) -> None:
    never, some = estimate([None, None, None]), estimate([None, 0.5, 0.6])
    crowd = [
        replace(rows[0], row=Row(name, label, LIVE), steps=steps, time=steps)
        for (name, label), steps in zip({"a": "SPlus", "b": "AdamW, defaults + EMA", "c": "C"}.items(),
                                        (rows[0].steps, never, some))
    ]  # fmt: skip
    figure = draw_ratios(crowd, looks([entry.row for entry in crowd]))
    FigureCanvasAgg(figure).draw()
    page = figure.bbox
    words = [text for text in figure.findobj(Text) if re.search("[A-Za-z]", text.get_text())]  # not the ticks' numbers
    boxes = [text.get_window_extent() for text in words if text.get_visible()]
    assert len(boxes) == 3 + 2 * 2 + 2 + 1
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)
    assert not [(one, other) for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]


def test_optimizers_differ_by_more_than_colour_and_their_weights_by_dashes() -> None:
    methods = ["adam", "splus", *(f"m{i}" for i in range(10))]
    look = looks([Row(name + suffix, name, LIVE) for name in methods for suffix in ("", "_ema", "_live")])
    assert len({(of.marker, of.dash) for of in look.values()}) == 3 * len(methods)
    assert len({look[name].variable for name in methods[:11]}) == 11
    assert look["m3_ema"].variable == look["m3"].variable


VISIT = """<!doctype html><title>begun</title>
<iframe src="report.html" style="width: 360px; height: 800px; border: 0"></iframe>
<script>
const frame = document.querySelector("iframe");
onload = async () => {
  const page = frame.contentDocument, box = page.querySelector("details.explore[open]");
  for (let i = 0; i < 200 && box.dataset.state !== "ready"; i++) await new Promise((done) => setTimeout(done, 50));
  for (const selector of ["[value=seconds]", "[data-of=scale]", "[value=adam]"]) box.querySelector(selector).click();
  const plots = frame.contentWindow.Bokeh.documents.map((of) => of.roots()[0]);
  document.body.textContent = JSON.stringify({
    state: box.dataset.state, beyond: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    scales: plots.map((plot) => plot.y_scale.type), across: plots[0].below[0].axis_label,
    hidden: [...new Set(plots.flatMap((plot) => plot.renderers.filter((r) => !r.visible).map((r) => r.name)))],
  });
};
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_in_a_browser_figures_obey_their_controls_and_nothing_is_wider_than_a_phone(report: Path) -> None:
    visit = report.with_name("visit.html")
    visit.write_text(VISIT)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    options += [f"--user-data-dir={report.parent / 'profile'}", "--enable-logging=stderr"]
    command = ["chromium", *options, "--virtual-time-budget=15000", visit.as_uri()]
    browser = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in browser.stderr.splitlines() if "CONSOLE" in line and "setting log level" not in line]
    assert not said
    found = re.search(r"<body>(\{.*\})</body>", browser.stdout)
    assert found, browser.stdout[:500]
    assert json.loads(found[1].replace("&gt;", ">")) == {
        "state": "ready",
        "beyond": 0,
        "scales": ["LogScale", "LogScale"],
        "across": "training time, s",
        "hidden": ["adam"],
    }
