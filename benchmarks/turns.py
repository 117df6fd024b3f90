"""Methods that train in one process and take turns, so that what else the machine does slows all of them alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from benchmarks.cells import Cell, present_origin
from benchmarks.sweep import POLL_SECONDS, Ended, Executor


@dataclass(frozen=True)
class Trial:
    """One cell of each method, of which the first one is the reference; what an executor takes for a cell.

    Attributes:
        steps: of each method in all.
        turn: steps in one turn.
        rounds: how often the whole is done, from the beginning.
    """

    name: str
    cells: tuple[Cell, ...]
    steps: int
    turn: int
    rounds: int

    @cached_property
    def config(self) -> DictConfig:
        runs = [OmegaConf.to_container(cell.config) for cell in self.cells]
        return OmegaConf.create({"runs": runs, "ends": self.ends, "rounds": self.rounds})

    @property
    def ends(self) -> list[int]:
        """The steps at the ends of the turns."""
        return [*range(self.turn, self.steps, self.turn), self.steps]

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits for the whole trial."""
        return hashlib.sha256("-".join(map(self.key, self.cells)).encode()).hexdigest()[:8]

    def key(self, cell: Cell) -> str:
        """Eight hexadecimal digits for all that the times of one of the cells, beside the reference, depend on."""
        text = "-".join((self.cells[0].hash, cell.hash, str(self.steps), str(self.turn), str(self.rounds)))
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def take_turns(config: DictConfig, directory: Path) -> dict[str, Any]:
    """Train ``config.runs`` in turns up to each of the steps ``config.ends``, anew in each of ``config.rounds``.

    Returns:
        Seconds by [round][turn][run]: "training" of the training clock, "averages" of keeping one of the averages that
        the training loop keeps beside every optimizer. And "made_by": code, torch and processor.
    """
    from train.trainer import Trainer

    result: dict[str, Any] = {"status": "finished", "made_by": present_origin(), "training": [], "averages": []}
    for _ in range(config.rounds):
        trainers = [Trainer(run) for run in config.runs]
        turns = []
        for number, end in enumerate(config.ends):
            order = list(range(len(trainers)))[:: -1 if number % 2 else 1]  # nobody always comes after the same one
            taken = {run: _turn(trainers[run], end) for run in order}
            turns.append([taken[run] for run in range(len(trainers))])
        for of, name in enumerate(("training", "averages")):
            result[name].append([[seconds[of] for seconds in of_turn] for of_turn in turns])
    return result


def _turn(trainer: Any, end: int) -> tuple[float, float]:
    """Steps up to ``end``, and a switch to the optimizer's averages and back wherever a run evaluates."""
    before = trainer.clock.seconds, trainer.averages.seconds_each
    while trainer.step < end:
        trainer.train_step()
        if trainer.step % trainer.config.evaluate_every == 0:
            with trainer.averaged_weights():
                pass
    return trainer.clock.seconds - before[0], trainer.averages.seconds_each - before[1]


def run_alone(trial: Trial, directory: Path, executor: Executor) -> Ended:
    """What became of a trial, with nothing else in the executor, which is closed."""
    directory.mkdir(parents=True, exist_ok=True)
    ended: Sequence[Ended] = ()
    with closing(executor):
        executor.start(trial, directory)
        while not ended:
            ended = executor.collect(POLL_SECONDS)
    return ended[0]
