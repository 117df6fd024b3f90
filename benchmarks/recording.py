"""State of the optimizer while a small GPT trains on the text, for measurements on more than random matrices."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from torch import Tensor

from benchmarks.cells import ROOT
from train.trainer import Trainer

PARAMETER = "transformer.blocks.0.mlp.expand.weight"  # (4 · width, width)


def recorded_states(width: int, steps: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """The state of the MLP's first matrix in a GPT of one block, by name and as (1, …), after each of ``steps``."""
    settings = ["preset=quick", "objective=language_modelling", "optimizer=splus", f"model.width={width}"]
    settings += ["model.depth=1", "batch_size=32", "steps=300"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        trainer = Trainer(compose("config", settings))
    recorded = []
    for step in range(1, steps[-1] + 1):
        trainer.train_step()
        if step in steps:
            state = trainer.optimizer.state[trainer.model.get_parameter(PARAMETER)]
            recorded.append({name: value[None].clone() for name, value in state.items() if isinstance(value, Tensor)})
    return recorded
