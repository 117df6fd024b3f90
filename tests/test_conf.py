"""The configuration files: every one composes, and says the same of every optimizer."""

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError
from runs import OBJECTIVES, ROOT, configuration, optimizer_file

from train.config import config_hash, training_config


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


@pytest.mark.parametrize("preset", options("preset"))
@pytest.mark.parametrize("schedule", options("schedule"))
def test_every_combination_composes_with_nothing_missing(schedule, preset):
    for objective in options("objective"):
        config = configuration(f"objective={objective}", f"schedule={schedule}", f"preset={preset}")
        for optimizer in options("optimizer"):
            config.optimizer = optimizer_file(optimizer)
            OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def test_every_model_belongs_to_an_objective():
    targets = {configuration(f"objective={objective}").model._target_ for objective in OBJECTIVES}
    assert {OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml")._target_ for name in options("model")} == targets


@pytest.mark.parametrize("data", options("data"))
def test_every_data_composes(data):
    config = configuration(f"data={data}")
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert callable(get_object(config.data._target_))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_optimizers_share_every_setting_but_their_own(objective):
    first, *others = (
        training_config(configuration(f"objective={objective}", f"optimizer={name}")) for name in options("optimizer")
    )
    assert all(first | {"optimizer": None} == other | {"optimizer": None} for other in others)


# AdamW's is torch's default, SGD's is coupled and multiplied by its momentum, Sophia's in other units (their files).
OWN_DECAY = {"adamw": 0.01, "sgd": 0.0001, "sophia": 0.001}


def test_weight_decay_is_everyones_but_where_a_file_says_why():
    for name in options("optimizer"):
        config = optimizer_file(name)
        assert config.weight_decay == OWN_DECAY.get(name, 0.1)


@pytest.mark.parametrize(("steps", "decay"), [(10_000, 0.999), (10**6, 0.999), (300, 1 - 10 / 300), (12, 0.5)])
def test_averaging_decay_follows_the_length_of_the_run(steps, decay):
    assert configuration("optimizer=splus", f"steps={steps}").optimizer.ema_decay == decay


def test_heads_keep_their_size_when_the_width_grows():
    assert configuration("preset=quick", "model.width=64").model.heads == 2
    assert configuration("preset=quick", "model.width=256").model.heads == 8
    with pytest.raises(InterpolationResolutionError, match=r"width=100 is not a multiple of preset.head_size=32"):
        _ = configuration("preset=quick", "model.width=100").model.heads


def test_hash_stands_for_the_training_and_not_for_where_it_is_kept():
    base = config_hash(configuration())
    assert base == config_hash(configuration("directory=elsewhere", "wandb.mode=offline", "keep_checkpoint=true"))
    assert base == config_hash(configuration("parallel=hsdp", "parallel.shard_size=4"))
    assert base != config_hash(configuration("seed=1"))
    assert base != config_hash(configuration("optimizer.lr=0.3"))
