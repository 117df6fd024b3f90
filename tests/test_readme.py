"""What the README and the guides show works as printed."""

import itertools
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from runs import configuration

from splus import PAPER
from splus.groups import WIDTH_RULES
from train.config import BESIDE

ROOT = Path(__file__).parent.parent
README = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_snippets_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python snippet runs, as it stands."""
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_commands_exist() -> None:
    """Every module and make target that the README names is there."""
    for module in set(re.findall(r"python -m ([a-z_.]+)", README)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets


def test_training_commands_compose() -> None:
    """Every command that trains is of settings that there are, each of several at once too."""
    commands = re.findall(r"^ {4}.*-m train ((?:.*\\\n)*.*)", README, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        words = command.replace("\\\n", " ").partition("#")[0].split()
        given = [word.partition("=") for word in words if "=" in word and not word.startswith("hydra/")]
        choices = [[f"{name}={value}" for value in values.split(",")] for name, _, values in given]
        for settings in itertools.product(*choices):
            OmegaConf.to_container(configuration(*settings), resolve=True, throw_on_missing=True)


def test_tests_exist() -> None:
    """Every test and file of tests that the guides name is there."""
    tests = {path.name: path.read_text() for path in (ROOT / "tests").glob("*.py")}
    defined = {name for text in tests.values() for name in re.findall(r"def (test_\w+)", text)}
    named = set(re.findall(r"`(?:tests/)?(test_\w+(?:\.py)?)`", README))
    assert named
    assert named <= defined | set(tests)


def test_published_settings_of_the_benchmark_are_the_package_s() -> None:
    """optimizer=splus_published is PAPER, but for what belongs to a run: its rate, decay and averaging horizon."""
    settings = configuration("optimizer=splus_published").optimizer
    of_the_run = {"lr", "weight_decay", "ema_decay", "whiten"}
    assert set(settings) - {"_target_", "groups", *BESIDE} == set(PAPER) - {"whiten"}
    # param_groups gives these two a step by a power of the length of a row; the authors' file has one constant for all.
    assert settings.groups == {
        name: {"elementwise_scale": PAPER["elementwise_scale"], "width_power": 0} for name in WIDTH_RULES
    }
    for name in set(PAPER) - of_the_run:
        expected = list(PAPER[name]) if isinstance(PAPER[name], tuple) else PAPER[name]
        assert settings[name] == expected, name
