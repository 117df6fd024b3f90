"""Optimizers of ``pytorch_optimizer`` as the training loop can run, save and resume them; their steps are unchanged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_optimizer
import torch
from torch import Tensor


class Kron(pytorch_optimizer.Kron):
    """Kron whose draws from numpy follow torch's generator, which seeds a run and is in its checkpoints."""

    def step(self, closure: Callable[[], float] | None = None, **options: Any) -> Any:
        np.random.seed(int(torch.randint(2**32, ())))
        return super().step(closure, **options)


class Sophia(pytorch_optimizer.SophiaH):
    """SophiaH that says at which steps it needs ``backward(create_graph=True)`` for its estimate of the Hessian.

    Its state is there before the first step: torch.distributed.checkpoint makes a missing one by a step on gradients
    of zero, which have no graph.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for group in self.param_groups:
            group["step"] = 0
            for parameter in group["params"]:
                names = ("momentum", "hessian_moment", "hessian")
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in names}

    @property
    def differentiates_gradients(self) -> bool:
        return bool(self.param_groups[0].get("step", 0) % self.update_period == 0)


class Shampoo(pytorch_optimizer.ScalableShampoo):
    """ScalableShampoo whose state dict holds tensors alone, so that it can be loaded with ``weights_only=True``."""

    # The parts of a parameter's state that are objects.
    PARTS = ("pre_conditioner", "graft")

    def state_dict(self) -> dict[str, Any]:
        whole = super().state_dict()
        states = {
            index: state | {part: tensors(state[part]) for part in self.PARTS}
            for index, state in whole["state"].items()
        }
        return whole | {"state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    loaded = self.state.pop(parameter)
                    self._make_state(group, parameter)
                    state = self.state[parameter]
                    state["momentum"] = loaded["momentum"]
                    for part in self.PARTS:
                        vars(state[part]).update(loaded[part])

    def _make_state(self, group: dict[str, Any], parameter: Tensor) -> None:
        """The parameter's state as before its first step, which the library makes where there is a gradient."""
        gradient, parameter.grad = parameter.grad, torch.zeros_like(parameter)
        self.init_group({**group, "params": [parameter]})
        parameter.grad = gradient


def tensors(part: object) -> dict[str, Any]:
    """The attributes that are tensors or lists of tensors."""
    return {
        name: value
        for name, value in vars(part).items()
        if isinstance(value, Tensor) or (isinstance(value, list) and value and isinstance(value[0], Tensor))
    }
