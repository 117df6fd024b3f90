"""Histories: steps, swaps, saves, loads and copies in any order are the steps alone.

``make fuzz`` draws thousands of longer ones, anew each time.
"""

import copy
import io
import math
import pickle
import random
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference import draws, drive, factor
from shadow import Shadow
from torch import Tensor, nn

from splus import SPlus
from splus.precision import state_dtype

# The reference is trusted as far as no sign hangs on less than this; rounding has then made differences far below.
MARGIN = 1e-7
CLOSE: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
Gradients = list[Tensor | None]


@dataclass
class Plan:
    """A parameter group: its options, and of each parameter the shape and dtype and whether it starts out frozen."""

    options: dict[str, Any]
    parameters: list[tuple[tuple[int, ...], torch.dtype, bool]]
    tied: bool  # the first one is listed twice


class Run:
    """Parameters and the optimizer of them. Factors start with full rank, so that bases are unique from the start."""

    def __init__(self, plans: Sequence[Plan], seed: int = 0) -> None:
        self.parameters: list[nn.Parameter] = []
        self.places: list[tuple[int, int]] = []  # group and position of each parameter
        self.seed = seed
        self.optimizer = SPlus([self.group(plans[0])])
        self.give_full_rank(0)
        for plan in plans[1:]:
            self.add(plan)

    def add(self, plan: Plan) -> None:
        before = len(self.parameters)
        self.optimizer.add_param_group(self.group(plan))
        self.give_full_rank(before)

    def group(self, plan: Plan) -> dict[str, Any]:
        number = self.places[-1][0] + 1 if self.places else 0
        listed = []
        for position, (shape, dtype, frozen) in enumerate(plan.parameters):
            start = draws(1, *shape, seed=1000 * self.seed + len(self.parameters), dtype=dtype)[0]
            listed.append(nn.Parameter(start, requires_grad=not frozen))
            self.parameters.append(listed[-1])
            self.places.append((number, position))
        return {"params": listed + listed[: plan.tied], **plan.options}

    def give_full_rank(self, first: int) -> None:
        for parameter in self.parameters[first:]:
            for name, value in self.optimizer.state[parameter].items():
                if name.startswith("factor"):
                    value.copy_(factor(value.shape[-1]))

    def everything(self) -> list[tuple[str, Any]]:
        """All there is after a history, by name."""
        named: list[tuple[str, Any]] = []
        for i, parameter in enumerate(self.parameters):
            named += [
                (f"{i}", parameter.detach()),
                *((f"{i}.{k}", v) for k, v in self.optimizer.state[parameter].items()),
            ]
        return named

    def copied(self) -> list[tuple[str, Any]]:
        return [(name, value.clone() if isinstance(value, Tensor) else value) for name, value in self.everything()]


def drawn_plan(seed: int) -> Plan:
    """Any group: drawn by the seed, because hypothesis itself prefers the first of each choice."""
    generator = random.Random(seed)

    def one_of(*values: Any) -> Any:
        return generator.choice(values)

    options = {
        "lr": one_of(0.1, 0.5),
        "betas": one_of((0.9, 0.97), (0.5, 0.9), (0.0, 0.95)),
        "eps": one_of(3e-7, 0.0, 0.1),
        "normalization_decay": one_of(0.5, 0.0, 0.9),
        "weight_decay": one_of(1e-2, 0.0, 3.0),
        "scale_weight_decay": one_of(True, False),
        "ema_decay": one_of(0.999, 0.9, 0.0),
        "precondition_frequency": one_of(10, 3, 1),
        "max_preconditioner_dim": one_of(4096, 4),
        "step_norm": one_of("spectral", "frobenius"),
        "step_scale": one_of("shape", "fan_in", "none"),
        "elementwise_scale": one_of(0.02, 0.5),
        "width_power": one_of(0.0, 1.0),
        "whiten": one_of(True, True, "auto", "2d", False),
        "stacked": one_of(False, True),
        "oversized": one_of("blocks", "unrotated", "published"),
        "sides": one_of("both", "shorter"),
        "refresh_method": one_of("qr", "eigh"),
        "refresh_growth": one_of(1.15, None, 2.0),
        "spread_refreshes": one_of(True, False),
        "maximize": one_of(False, True),
    }
    parameters, split = [], []
    for _ in range(one_of(1, 2, 3)):
        dimensions = one_of(2, 2, 2, 0, 1, 3, 4)
        longest = {0: 1, 1: 9, 2: 9, 3: 5, 4: 3}[dimensions]
        shape = [generator.randint(1, longest) for _ in range(dimensions)]
        if shape and generator.random() < 0.1:
            shape[generator.randrange(dimensions)] = 0
        dtype = one_of(torch.float64, torch.float64, torch.float32, torch.bfloat16)
        parameters.append((tuple(shape), dtype, generator.random() < 0.15))
        rows = shape[-2 if options["stacked"] else 0] if dimensions > 1 else 0
        split.append((1, rows - 1) if rows > 1 and generator.random() < 0.3 else None)
    tied = generator.random() < 0.15
    return Plan({**options, "split": split + split[:tied]}, parameters, tied)


seeds = st.integers(0, 2**32)
plans = seeds.map(drawn_plan)


def exactly(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b


@dataclass
class Save:
    """A file of both state dicts, and all that is known of the history up to it."""

    file: bytes
    plans: int
    events: int
    shadows: list[Shadow]
    everything: list[tuple[str, Any]]


class Histories(RuleBasedStateMachine):
    """What users do with an optimizer, in any order."""

    @initialize(plan=plans, seed=seeds)
    def start(self, plan: Plan, seed: int) -> None:
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate parameters")
        self.plans, self.events = [plan], list[tuple[Any, ...]]()
        self.run = Run(self.plans)
        self.shadows = [Shadow(self.optimizer, *place) for place in self.run.places]
        self.saves: list[Save] = []
        self.step(random.Random(seed), 10)

    @property
    def optimizer(self) -> SPlus:
        return self.run.optimizer

    @rule(seed=seeds)
    def one_step(self, seed: int) -> None:
        self.step(random.Random(seed), 1)

    @rule(seed=seeds)
    def a_few_steps(self, seed: int) -> None:
        self.step(random.Random(seed), 4)

    @rule(seed=seeds)
    def steps_past_a_refresh(self, seed: int) -> None:
        self.step(random.Random(seed), 11)

    def step(self, generator: random.Random, steps: int) -> None:
        """Steps in which some parameters have no gradient or one that is zero."""
        self.optimizer.train()
        for _ in range(steps):
            gradients: Gradients = []
            for parameter in self.run.parameters:
                kind, start = generator.random(), generator.randrange(2**40)
                full = draws(1, *parameter.shape, seed=start, dtype=parameter.dtype)[0]
                absent = kind < 0.1 or not parameter.requires_grad
                gradients.append(None if absent else full * (kind > 0.2))
            drive(self.optimizer, self.run.parameters, [gradients])
            self.events.append(("step", gradients))
            for shadow, gradient in zip(self.shadows, gradients):
                if gradient is not None:
                    shadow.step(gradient.double())

    @rule(mode=st.booleans())
    def swap(self, mode: bool) -> None:
        self.optimizer.train(mode)
        if not mode:
            with pytest.raises(RuntimeError, match="averaged weights"):
                self.optimizer.step()

    @rule(inner=st.booleans(), fails=st.booleans())
    def look(self, inner: bool, fails: bool) -> None:
        before = self.run.copied()
        try:
            with self.optimizer.averaged():
                with self.optimizer.averaged() if inner else nullcontext():
                    self.holds()
                self.measure()
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        self.is_still(before)

    def measure(self) -> None:
        for of_group in self.optimizer.metrics():
            assert all(math.isfinite(value) and value >= 0 for value in of_group.values())
            assert of_group["orthogonality_error"] < 1e-4

    @rule(group=st.integers(0, 2), lr=st.sampled_from([0.1, 0.2, 0.7]), thawed=st.integers(0, 8))
    def change(self, group: int, lr: float, thawed: int) -> None:
        """A rate, as a scheduler does, and a parameter that is frozen no more."""
        self.run.parameters[thawed % len(self.run.parameters)].requires_grad_(True)
        group %= len(self.plans)
        self.optimizer.param_groups[group]["lr"] = lr
        self.events.append(("lr", group, lr))
        for shadow, (number, _) in zip(self.shadows, self.run.places):
            if number == group:
                shadow.set_lr(lr)

    @precondition(lambda self: len(self.plans) < 3)
    @rule(plan=plans)
    def add_group(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.run.add(plan)
        self.events.append(("group", plan))
        self.shadows += [Shadow(self.optimizer, *place) for place in self.run.places[len(self.shadows) :]]

    @rule(pickled=st.booleans())
    def go_on_with_a_copy(self, pickled: bool) -> None:
        before = self.run.copied()
        self.run = pickle.loads(pickle.dumps(self.run)) if pickled else copy.deepcopy(self.run)
        self.is_still(before)

    @rule(mode=st.booleans())
    def save(self, mode: bool) -> None:
        self.optimizer.train(mode)
        file = io.BytesIO()
        torch.save(([parameter.detach() for parameter in self.run.parameters], self.optimizer.state_dict()), file)
        known = (len(self.plans), len(self.events), copy.deepcopy(self.shadows), self.run.copied())
        self.saves = [*self.saves[-2:], Save(file.getvalue(), *known)]

    @precondition(lambda self: self.saves)
    @rule(back=st.integers(1, 3), fresh=st.booleans(), optimizer_first=st.booleans())
    def load(self, back: int, fresh: bool, optimizer_first: bool) -> None:
        """The last save or an older one, into what is there or into a new model that starts elsewhere."""
        save = self.saves[-min(back, len(self.saves))]
        if fresh or save.plans < len(self.plans):
            trainable = [parameter.requires_grad for parameter in self.run.parameters]
            self.plans = self.plans[: save.plans]
            self.run = Run(self.plans, seed=1)
            self.run.seed = 0  # of groups that are added later
            for parameter, grad in zip(self.run.parameters, trainable):
                parameter.requires_grad_(grad)
        weights, state_dict = torch.load(io.BytesIO(save.file), weights_only=True)
        if optimizer_first:
            self.optimizer.load_state_dict(state_dict)
        for parameter, value in zip(self.run.parameters, weights):
            parameter.data.copy_(value)
        if not optimizer_first:
            self.optimizer.load_state_dict(state_dict)
        self.events, self.shadows = self.events[: save.events], copy.deepcopy(save.shadows)
        self.saves = [other for other in self.saves if other.events <= save.events and other.plans <= save.plans]
        self.is_still(save.everything)

    def is_still(self, before: list[tuple[str, Any]]) -> None:
        changed = [
            a for (a, x), (b, y) in zip(before, self.run.everything(), strict=True) if a != b or not exactly(x, y)
        ]
        assert changed == []

    @invariant()
    def holds(self) -> None:
        """Everything is finite, of its dtype and outside any graph, and fp64 parameters are where the slow rule is."""
        for parameter, shadow in zip(self.run.parameters, self.shadows):
            state = self.optimizer.state[parameter]
            for value in state.values():
                assert not isinstance(value, Tensor) or (
                    value.isfinite().all() and value.dtype == state_dtype(parameter.dtype)
                )
                assert not isinstance(value, Tensor) or (not value.requires_grad and value.grad_fn is None)
            in_model = parameter.detach()
            if not self.optimizer.training:
                assert torch.equal(in_model, state["average"].to(parameter.dtype))
            if parameter.dtype == torch.float64 and shadow.margin > MARGIN:
                weights = in_model if self.optimizer.training else state["weights"]
                torch.testing.assert_close(weights, shadow.whole("W"), **CLOSE)
                torch.testing.assert_close(state["average"], shadow.whole("average"), **CLOSE)
                if not shadow.layout:
                    torch.testing.assert_close(state["momentum"], shadow.whole("M"), **CLOSE)
                else:
                    follows(state, shadow)

    def teardown(self) -> None:
        """The end is bit for bit that of a run that only took the steps, and what never moved is as made."""
        if not hasattr(self, "run"):
            return
        self.optimizer.train()
        groups = sum(event[0] == "group" for event in self.events)
        plain = Run(self.plans[: len(self.plans) - groups])
        for kind, *event in self.events:
            if kind == "step":
                drive(plain.optimizer, plain.parameters, [event[0]])
            elif kind == "lr":
                plain.optimizer.param_groups[event[0]]["lr"] = event[1]
            else:
                plain.add(event[0])
        self.is_still(plain.everything())
        for index, parameter in enumerate(self.run.parameters):
            if self.optimizer.state[parameter]["step"] == 0:
                assert torch.equal(parameter, draws(1, *parameter.shape, seed=index, dtype=parameter.dtype)[0])


def follows(state: dict[str, Any], shadow: Shadow) -> None:
    """The momenta and factors of a whitened parameter are the slow rule's, matrix by matrix."""
    for name, attribute in (("momentum", "M"), ("factor_left", "L"), ("factor_right", "R")):
        for suffix, expected in shadow.matrices(attribute):
            if name + suffix in state:
                stacked = torch.stack(expected)
                torch.testing.assert_close(state[name + suffix].reshape(stacked.shape), stacked, **CLOSE)


TestHistories = Histories.TestCase
