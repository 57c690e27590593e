"""`relax new`: what it writes works as it stands, and nothing is overwritten."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from relax.algorithms.advantages import advantages
from relax.cli.command import typed
from relax.cli.new import new, next_steps
from relax.config import load_config
from relax.config.algorithm import CustomConfig
from relax.config.data import GeneratorDataConfig
from relax.config.reward import FunctionRewardConfig
from relax.data.prompts import open_prompts
from relax.errors import ConfigError
from relax.rewards.table import make_scorer
from relax.types import Ragged


def test_a_new_reward_and_its_data_fit_together_and_their_tests_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [*new("reward", "my_reward", tmp_path), *new("data", "my_data", tmp_path)]
    assert [path.name for path in written] == ["my_reward.py", "test_my_reward.py", "my_data.py", "test_my_data.py"]
    monkeypatch.syspath_prepend(str(tmp_path))
    row = open_prompts(GeneratorDataConfig(path="my_data:problem"), seed=0).row(3)
    scorer = make_scorer(FunctionRewardConfig(path="my_reward:score", options={"close": 0.2}))
    assert scorer.call(row.messages, f"= {row.answer}", row.answer, {})["reward"] == 1.0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, written)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_new_algorithm_computes_advantages_and_its_tests_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, test = new("algorithm", "my_algorithm", tmp_path)
    assert next_steps("algorithm", "my_algorithm", tmp_path)[-1].endswith("algorithm.path=my_algorithm:advantage")
    monkeypatch.syspath_prepend(str(tmp_path))
    for scope in ("group", "batch"):
        config = CustomConfig(path=f"{source.stem}:advantage", scope=scope, options={"floor": 4.0})
        columns = {"reward": np.array([1.0, 0.0, 0.0]), "loss_mask": Ragged.pack([np.array([0, 1], np.uint8)] * 3)}
        made = advantages(config, columns, group_ids=np.array([5, 5, 6]), length_budget=8)["advantages"]
        assert isinstance(made, Ragged)
        assert made.values.tolist() == [0.0, 0.125, 0.0, -0.125, 0.0, 0.0]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_new_run_file_is_valid_and_named(tmp_path: Path) -> None:
    [path] = new("run", "first-run", tmp_path / "deeper")
    config = load_config(path)
    assert (config.run.name, config.reward.type) == ("first-run", "math")
    steps = next_steps("run", "first-run", tmp_path)[1:]
    assert [step.removeprefix(f"{Path(sys.executable).parent}/") for step in steps] == [
        "relax check first-run.toml",
        "relax train first-run.toml",
    ]


def test_what_is_written_passes_the_lint_of_the_repository_it_is_made_in(tmp_path: Path) -> None:
    written = [path for kind in ("reward", "data", "algorithm") for path in new(kind, f"linted_{kind}", tmp_path)]
    settings = ["--no-cache", "--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for verb in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *verb, *settings, *map(str, written)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


def test_a_command_is_shown_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    program = folder / "relax"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert typed("relax status x", tmp_path) == ".venv/bin/relax status x"
    assert typed("relax status x", tmp_path / "elsewhere") == f"{program} status x"
    monkeypatch.setenv("PATH", str(folder))
    assert typed("relax status x", tmp_path) == "relax status x"


@pytest.mark.parametrize("kind", ["reward", "data", "algorithm", "run"])
def test_nothing_is_overwritten_and_nothing_half_written(kind: str, tmp_path: Path) -> None:
    last = new(kind, "overwritten", tmp_path)[-1]
    for path in tmp_path.iterdir():
        if path != last:
            path.unlink()
    last.write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        new(kind, "overwritten", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("rewards", "x", "there are reward, data, algorithm, run; did you mean reward?"),
        ("reward", "my-reward.py", "did you mean 'my_reward'?"),
        ("reward", "class", "cannot name a Python module"),
        ("reward", "math", "is the name of an installed Python module"),
        ("data", "datasets", "is the name of an installed Python module"),
        ("run", "../x", "cannot name a run"),
        ("run", "x.toml", "without .toml"),
    ],
)
def test_a_wrong_kind_or_name_is_refused(kind: str, name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        new(kind, name, tmp_path)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file: cannot be written"):
        new("run", "x", tmp_path / "file")
