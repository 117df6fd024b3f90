"""What a step of SPlus costs beside other optimizers, and beside its six matrix products alone.

    python -m benchmarks.step_time                                (the sets large, many and conv; 15 minutes on 2 cores)
    python -m benchmarks.step_time --sets gpt2 --periods 1        (12 GB; half an hour)
    python -m benchmarks.step_time --device cuda

Optimizers take turns in one process, a step each, so that all of them meet the same noise. Columns:

first       the first step, with the first bases of those that make them all at once
step        median of steps without a refresh
mean        over whole periods of 10 steps, refreshes included
slowest     of all steps after the first, early refreshes included
state       bytes of the optimizer's state a parameter
temporary   most bytes that a step holds beyond parameters, gradients and state

All times are given in milliseconds and over those of the floor, taken in the same rounds: the six products of SPlus's
rule in fp32, batched by shape, alone. Written to results/step_time/: a CSV and a plot.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.contenders import CONTENDERS, PERIOD, SETS, Contender, Floor, ParameterSet, Run
from benchmarks.csv_file import write_csv

TIMES = ("first", "step", "mean", "slowest")
Row = dict[str, Any]


def main() -> None:
    arguments = parsed_arguments()
    device = torch.device(arguments.device)
    console, rows = Console(), []
    for name in arguments.sets:
        chosen = [c for c in CONTENDERS if not arguments.only or any(word in c.name for word in arguments.only)]
        rows += measure(name, SETS[name](), chosen, device, arguments)
        console.print(table([row for row in rows if row["set"] == name], SETS[name]()))
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    write_csv(rows, output / "step_time.csv")
    plot(rows, output / "step_time.png")
    console.print(f"Written to {output}: step_time.csv, step_time.png", highlight=False)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["large", "many", "conv"])
    parser.add_argument("--only", nargs="+", help="parts of names of optimizers; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--early", type=int, default=15, help="steps from the start that count for the slowest")
    parser.add_argument("--rounds", type=int, default=15, help="steps without a refresh, each optimizer in turn")
    parser.add_argument("--periods", type=int, default=2, help="periods with refreshes, each optimizer in turn")
    parser.add_argument("--output", default="results/step_time")
    return parser.parse_args()


def measure(
    name: str, parameters: ParameterSet, contenders: list[Contender], device: torch.device, settings: argparse.Namespace
) -> list[Row]:
    """A row for the floor and for every contender on one parameter set."""
    generator = torch.Generator(device).manual_seed(1)
    shapes = (*parameters.matrices, *parameters.others)
    gradients = [[torch.randn(s, generator=generator, device=device) for s in shapes] for _ in range(3)]
    total = len(contenders) * (settings.early + settings.rounds + settings.periods * PERIOD)
    temporary = {c.name: peak_temporaries(c, parameters, gradients) for c in tqdm(contenders, desc=f"{name}: memory")}
    runs = {contender.name: Run(contender, parameters, gradients) for contender in contenders}
    floor = Floor(parameters, device)
    times: dict[str, dict[str, list[float]]] = {n: {"early": [], "plain": [], "period": []} for n in ("floor", *runs)}
    with tqdm(total=total, desc=f"{name}: steps", unit="step") as bar:

        def take_turns(phase: str) -> None:
            times["floor"][phase].append(seconds(floor.step, device))
            for contender, run in runs.items():
                run.prepare()
                times[contender][phase].append(seconds(run.step, device))
                bar.update()

        for _ in range(settings.early):
            take_turns("early")
        for run in runs.values():
            run.settle()
        before = {contender: run.set_options(run.contender.without) for contender, run in runs.items()}
        for _ in range(settings.rounds):
            take_turns("plain")
        for contender, run in runs.items():
            run.set_options(before[contender])
        for _ in range(settings.periods * PERIOD):
            take_turns("period")
    unit = {phase: statistics.median(of) for phase, of in times["floor"].items()}
    rows = [{"set": name, "optimizer": "the six products alone", "step": unit["plain"], "step/floor": 1.0}]
    for contender, run in runs.items():
        of = times[contender]
        whole = [statistics.mean(of["period"][i * PERIOD : (i + 1) * PERIOD]) for i in range(settings.periods)]
        row: Row = {
            "set": name,
            "optimizer": contender,
            "first": of["early"][0],
            "step": statistics.median(of["plain"]),
            "mean": statistics.median(whole),
            "slowest": max(of["early"][1:] + of["plain"] + of["period"]),
        }
        phases = {"first": "early", "step": "plain", "mean": "period", "slowest": "early"}
        row |= {f"{column}/floor": row[column] / unit[phases[column]] for column in TIMES}
        row |= {"slowest/step": row["slowest"] / row["step"], "first/step": row["first"] / row["step"]}
        row |= {"state": run.state_bytes() / parameters.entries, "temporary": temporary[contender]}
        rows.append(row)
    return rows


def seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def peak_temporaries(contender: Contender, parameters: ParameterSet, gradients: list[list[torch.Tensor]]) -> int:
    """The most bytes that steps with refreshes hold beyond what is there between steps, scratch memory included."""
    run = Run(contender, parameters, gradients)
    device = gradients[0][0].device

    def steps() -> None:
        # SPlus has its state from the start and refreshes a tenth of its matrices in each of the first ten steps; the
        # others make theirs in the first step, and refresh all in one.
        for _ in range(PERIOD if resting else 3):
            run.prepare()
            run.step()

    resting = run.state_bytes()
    if contender.period and not resting:
        run.set_options({contender.period: 2})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        steps()
        return torch.cuda.max_memory_allocated(device) - before - (run.state_bytes() - resting)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        steps()
    allocations = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak - (run.state_bytes() - resting)


def table(rows: list[Row], parameters: ParameterSet) -> Table:
    two = parameters.largest_buckets(2) * 4 / 2**20
    shown = Table(
        f"{rows[0]['set']}: {parameters.entries / 1e6:.1f} M", *TIMES, "slowest/step", "state B/p", "temporary MiB",
        caption=f"ms (over the six products); the gradients of the two largest shapes are {two:.0f} MiB",
    )  # fmt: skip
    for row in rows:
        cells = [f"{row[c] * 1e3:.1f} ({row[c + '/floor']:.2f})" if c in row else "" for c in TIMES]
        if "state" in row:
            cells += [f"{row['slowest/step']:.1f}", f"{row['state']:.1f}", f"{row['temporary'] / 2**20:.0f}"]
        shown.add_row(row["optimizer"], *cells)
    return shown


def plot(rows: list[Row], path: Path) -> None:
    """Step and mean over a period of every optimizer, over the floor's, a panel for each set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = list(dict.fromkeys(row["set"] for row in rows))
    figure, axes = pyplot.subplots(1, len(sets), figsize=(4 + 4 * len(sets), 4), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], sets):
        shown = [row for row in rows if row["set"] == name and "mean" in row][::-1]
        places = range(len(shown))
        axis.barh([p + 0.2 for p in places], [row["step/floor"] for row in shown], 0.4, label="without a refresh")
        axis.barh([p - 0.2 for p in places], [row["mean/floor"] for row in shown], 0.4, label="mean over a period")
        axis.axvline(1, color="black", linewidth=1)
        axis.set_yticks(list(places), [row["optimizer"] for row in shown])
        axis.set_title(name)
        axis.set_xlabel("time of a step / of the six products")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
