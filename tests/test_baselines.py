"""The optimizers of conf/optimizer/: each learns, resumes bit for bit and is used as its authors say."""

import copy
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from runs import OBJECTIVES, ROOT, configuration, optimizer_file, smoke
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from train.config import config_hash, training_config
from train.loop import run
from train.optimizers import build_optimizer, check_parallel
from train.trainer import Trainer, generator

OPTIMIZERS = sorted(path.stem for path in (ROOT / "conf" / "optimizer").glob("*.yaml"))
AVERAGING = {"schedulefree", "splus", "splus_sign", "splus_published"}


def but(*names: str) -> list[str]:
    """The optimizers but those that another test has."""
    return [name for name in OPTIMIZERS if name not in names]


composed = cache(smoke)


def settings(objective: str, optimizer: str, *overrides: str) -> DictConfig:
    """What hydra composes, in a tenth of its time."""
    config = copy.deepcopy(composed(objective))
    OmegaConf.set_struct(config, False)
    config.optimizer = optimizer_file(optimizer)
    config.merge_with_dotlist(list(overrides))
    return config


def trained(optimizer: str, steps: int, *overrides: str, objective: str = "language_modelling") -> Trainer:
    trainer = Trainer(settings(objective, optimizer, *overrides))
    for _ in range(steps):
        trainer.train_step()
    return trainer


@pytest.fixture(scope="module")
def diffusion() -> nn.Module:
    return Trainer(smoke("diffusion")).model


def held_out(trainer: Trainer) -> dict[str, float]:
    return {weights: measures["loss"] for weights, _, measures in trainer.evaluate()}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("optimizer", but("adam"))
def test_every_optimizer_lowers_the_held_out_loss(optimizer, objective):
    """Where its sweep begins; with its live weights, its own averages or those kept beside it."""
    rate = f"optimizer.lr=${{optimizer.sweep.start.{objective}}}"
    trainer = trained(optimizer, 0, rate, objective=objective)
    before = held_out(trainer)
    for _ in range(20):
        trainer.train_step()
    after = held_out(trainer)
    own = ["averaged"] if optimizer in AVERAGING else []
    assert list(after) == ["live", *own, "ema_0.5", "ema_0.9"]
    assert all(loss < 0.99 * before["live"] for loss in after.values()), (before, after)


@pytest.mark.parametrize("optimizer", but("adam", "splus"))
def test_a_run_that_was_stopped_continues_bit_for_bit(tmp_path, optimizer):
    """From a checkpoint on the disk, in a process whose generators stand elsewhere."""
    # Kron's draw, of one in a hundred, then matters every other step.
    balance = ["optimizer.balance_prob=0.5"] if optimizer == "psgd_kron" else []
    whole = trained(optimizer, 7, *balance)
    whole.save(tmp_path)
    for _ in range(6):
        whole.train_step()
    resumed = Trainer(whole.config)
    torch.manual_seed(123)
    np.random.seed(123)
    assert resumed.resume(tmp_path)
    for _ in range(6):
        resumed.train_step()
    assert resumed.hash() == whole.hash()
    assert held_out(resumed) == held_out(whole)


@pytest.mark.parametrize("optimizer", but("splus", "splus_sign", "splus_published"))
def test_weight_matrices_alone_decay_and_apart_from_the_gradients(diffusion, optimizer):
    """A step on gradients of zero multiplies them by 1 - lr · weight_decay; SGD's decay is part of the gradient."""
    config = settings("diffusion", optimizer, "optimizer.lr=0.5", "optimizer.weight_decay=0.1").optimizer
    model = copy.deepcopy(diffusion)
    built = build_optimizer(config, model)
    before = [[p.detach().clone() for p in group["params"]] for group in built.param_groups]
    for _ in range(2 if optimizer == "soap" else 1):  # SOAP's first step makes its bases and nothing else
        for parameter in model.parameters():
            parameter.grad = parameter * 0 if optimizer == "sophia" else torch.zeros_like(parameter)
        built.step()
    factor = 1 - 0.5 * 0.1 * (1.9 if optimizer == "sgd" else 1)  # Nesterov's first step is 1 + momentum
    for group, (name, weights) in zip(built.param_groups, zip(("whitened", "embeddings", "head"), before)):
        assert group["name"] == name
        for p, w in zip(group["params"], weights):
            torch.testing.assert_close(p.detach(), w * factor if name == "whitened" else w)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_schedule_reaches_every_parameter(optimizer):
    """At a learning rate of zero nothing moves, at another everything does: of Schedule-Free its iterates z."""
    trainer = trained(optimizer, 2)
    iterates = [trainer.optimizer.state[p].get("z", p) for p in trainer.model.parameters()]
    for rate in (0.0, 1e-3):
        before = [iterate.detach().clone() for iterate in iterates]
        trainer.scheduler.base_lrs = [rate] * len(trainer.scheduler.base_lrs)
        trainer.scheduler.step()
        trainer.train_step()
        assert [torch.equal(now, was) for now, was in zip(iterates, before)] == [rate == 0] * len(before)


def test_where_a_sweep_begins_is_said_and_changes_no_training():
    for optimizer in OPTIMIZERS:
        start = optimizer_file(optimizer).sweep.start
        assert set(start) == set(OBJECTIVES)
        assert all(rate > 0 for rate in start.values())
    config, other = (configuration(f"optimizer.sweep.start.diffusion={rate}") for rate in (1, 2))
    assert config_hash(config) == config_hash(other)
    assert "sweep" not in training_config(config)["optimizer"]


def test_an_optimizer_is_added_by_a_file_alone(tmp_path):
    """A YAML in a directory of the user's own, with the optimizer of another library and nothing about sweeps."""
    (tmp_path / "optimizer").mkdir()
    file = "_target_: torch.optim.NAdam\nlr: 0.003\nweight_decay: 0.1\ndecoupled_weight_decay: true\n"
    (tmp_path / "optimizer" / "nadam.yaml").write_text(file)
    config = smoke("language_modelling", "nadam", f"hydra.searchpath=[file://{tmp_path}]")
    OmegaConf.set_struct(config, False)
    assert run(config, tmp_path / "run", progress=False)["status"] == "finished"
    del config.optimizer.weight_decay
    with pytest.raises(ValueError, match=r"torch\.optim\.NAdam has no weight_decay; add"):
        Trainer(config)


@pytest.mark.parametrize(
    ("mode", "refused"), [("ddp", ["sophia"]), ("fsdp", ["psgd_kron", "shampoo", "soap", "sophia"])]
)
def test_optimizers_are_refused_where_they_do_not_work(mode, refused):
    """Those that need whole matrices or second derivatives; torch's Muon multiplies DTensors."""
    config = configuration(f"parallel={mode}")
    for optimizer in OPTIMIZERS:
        config.optimizer = optimizer_file(optimizer)
        refusal = pytest.raises(ValueError, match=rf"not work with parallel={mode} .*; set parallel=none")
        with refusal if optimizer in refused else nullcontext():
            check_parallel(config)


def test_sgd_has_nesterovs_momentum():
    optimizer = trained("sgd", 0).optimizer
    assert {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups} == {(0.9, True)}


def test_schedule_free_is_evaluated_at_the_mean_of_its_iterates():
    """At x, the mean of all z weighted by the square of the rate; gradients are taken elsewhere, at y."""
    trainer, iterates, rates = trained("schedulefree", 0), [], []
    for _ in range(6):
        rates.append(trainer.train_step()[1])
        iterates.append([trainer.optimizer.state[p]["z"].clone() for p in trainer.model.parameters()])
    weights = torch.tensor(rates) ** 2 / sum(rate**2 for rate in rates)
    means = [sum(w * z for w, z in zip(weights, of_one)) for of_one in zip(*iterates)]
    assert not any(torch.allclose(p, x, atol=1e-6) for p, x in zip(trainer.model.parameters(), means) if p.ndim > 1)
    with trainer.averaged_weights():
        for p, x in zip(trainer.model.parameters(), means):
            torch.testing.assert_close(p.detach(), x, rtol=1e-4, atol=1e-6)


def test_the_constant_schedules_warmup_is_schedule_frees_own():
    """Which weights the first iterates less."""
    own = trained("schedulefree", 6, "schedule.warmup=0", "optimizer.warmup_steps=4")
    assert own.hash() == trained("schedulefree", 6).hash()


def test_sophia_has_an_estimate_of_the_hessian_every_ten_steps():
    """Hutchinson's z · Hz of the batch's loss; in the steps between, gradients have no graph."""
    trainer = trained("sophia", 0, objective="diffusion")
    optimizer, parameters = trainer.optimizer, list(trainer.model.parameters())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.manual_seed(7)
    with sdpa_kernel(SDPBackend.MATH):
        batch = trainer.objective.batch(trainer.config.batch_size, generator(trainer.config.seed, "batch", 0))
        loss = trainer.objective.loss(trainer.model, batch)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    draws = [torch.randn_like(p) for p in parameters]
    products = torch.autograd.grad(gradients, parameters, draws)
    torch.manual_seed(7)
    trainer.train_step()
    for p, z, Hz in zip(parameters, draws, products):
        torch.testing.assert_close(optimizer.state[p]["hessian_moment"], 0.01 * z * Hz, rtol=1e-4, atol=1e-9)
    refreshed = [1]
    for step in range(2, 23):
        before = [optimizer.state[p]["hessian_moment"].clone() for p in parameters]
        graphs = watched_graphs(trainer)
        trainer.train_step()
        moved = [not torch.equal(optimizer.state[p]["hessian_moment"], h) for p, h in zip(parameters, before)]
        assert all(moved) or not any(moved)
        assert graphs == [all(moved)]
        refreshed += [step] * all(moved)
    assert refreshed == [1, 11, 21]


def watched_graphs(trainer: Trainer) -> list[bool]:
    """Filled in the next step: whether the gradients that it takes have a graph."""
    graphs: list[bool] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradient = optimizer.param_groups[0]["params"][0].grad
        graphs.append(gradient is not None and gradient.grad_fn is not None)
        handle.remove()

    handle = trainer.optimizer.register_step_pre_hook(note)
    return graphs


def test_micro_batches_give_sophia_the_hessian_of_the_whole_batch():
    whole, parts = (trained("sophia", 0, f"micro_batch={size}") for size in ("null", 4))
    for trainer in (whole, parts):
        torch.manual_seed(7)
        trainer.train_step()
    for p, q in zip(whole.model.parameters(), parts.model.parameters()):
        h, g = (t.optimizer.state[r]["hessian_moment"] for t, r in ((whole, p), (parts, q)))
        torch.testing.assert_close(h, g, rtol=1e-3, atol=1e-7)


def test_shampoo_has_the_roots_of_its_factors_every_ten_steps():
    """The inverse fourth root on each side of a matrix, from step 25 on; vectors have none and take RMSProp's step."""
    trainer = trained("shampoo", 0)
    optimizer = trainer.optimizer
    matrix = optimizer.param_groups[0]["params"][0]
    vector = next(p for p in trainer.model.parameters() if p.ndim == 1)
    refreshed, roots = [], [torch.eye(side) for side in matrix.shape]
    for step in range(1, 32):
        trainer.train_step()
        part = optimizer.state[matrix]["pre_conditioner"]
        if not all(torch.equal(now, before) for now, before in zip(part.pre_conditioners, roots)):
            refreshed.append(step)
            roots = [root.clone() for root in part.pre_conditioners]
            for factor, root in zip(part.statistics, roots):
                values, vectors = torch.linalg.eigh(factor.double())
                damped = values.clamp(min=0) + 1e-6 * values.max()
                torch.testing.assert_close(root.double(), vectors * damped**-0.25 @ vectors.mT, rtol=0.05, atol=0.01)
    assert refreshed == [10, 20, 30]
    assert len(optimizer.state[vector]["pre_conditioner"].pre_conditioners) == 0
    assert all(optimizer.is_precondition_step(step) == (step >= 25) for step in range(1, 32))


def test_soap_turns_its_bases_every_ten_steps():
    """Of embeddings and the head too; step 1 makes the first ones and moves nothing."""
    trainer = trained("soap", 0)
    start = trainer.hash()
    trainer.train_step()
    assert trainer.hash() == start
    matrices = [p for p in trainer.model.parameters() if p.ndim == 2]
    turned, bases = [], [trainer.optimizer.state[p]["Q"] for p in matrices]
    for step in range(2, 23):
        trainer.train_step()
        now = [trainer.optimizer.state[p]["Q"] for p in matrices]
        moved = [not torch.equal(Q, before) for new, old in zip(now, bases) for Q, before in zip(new, old)]
        assert all(moved) or not any(moved)
        turned += [step] * all(moved)
        bases = now
    assert turned == [11, 21]
    assert all(len(of) == 2 for of in bases)
    for Q in (Q for of in bases for Q in of):
        torch.testing.assert_close(Q.mT @ Q, torch.eye(len(Q)), rtol=0, atol=1e-4)


def test_psgd_fits_its_factors_at_every_early_step():
    """Triangular ones on both sides of every matrix, as the schedule of the first 500 steps asks."""
    trainer = trained("psgd_kron", 1)
    matrices = [p for p in trainer.model.parameters() if p.ndim == 2]
    for _ in range(4):
        before = [[Q.clone() for Q in trainer.optimizer.state[p]["Q"]] for p in matrices]
        trainer.train_step()
        for p, factors in zip(matrices, before):
            for Q, old, side in zip(trainer.optimizer.state[p]["Q"], factors, p.shape):
                assert Q.shape == (side, side)
                assert torch.equal(Q, Q.triu())
                assert not torch.equal(Q, old)


def test_einsums_of_psgd_are_contracted_in_a_good_order():
    """Without opt_einsum a step of one 256×64 matrix goes by way of a tensor of 268 million entries."""
    assert torch.backends.opt_einsum.is_available()
