"""The script that people read first runs, and what it trains changes what it samples."""

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from relax.config import RunConfig, load_config
from relax.models.tiny import build_tiny_model

SCRIPT = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("one_file_grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=300)
    return folder


def short_run(model: Path, steps: int) -> RunConfig:
    """Any digit in the response is worth a reward: an untrained model finds that now and then."""
    overrides = [
        f"model.path={model}",
        "reward.type=format",
        "reward.pattern=.*[0-9].*",
        f"train.num_steps={steps}",
        "train.lr=1e-2",
        "rollout.prompts_per_step=8",
        "rollout.group_size=4",
        "rollout.max_new_tokens=4",
    ]
    return load_config(SCRIPT.parent / "arithmetic" / "run.toml", overrides)


def test_a_few_steps_raise_the_reward(script: ModuleType, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = asyncio.run(script.train(short_run(model, 16)))
    assert len(curve) == 16
    assert np.mean(curve[-4:]) > np.mean(curve[:4]) + 0.2
    printed = capsys.readouterr().out
    assert printed.count("reward") == 16
    assert "for example" in printed


def test_the_script_is_short_enough_to_be_read() -> None:
    assert len(SCRIPT.read_text("utf-8").splitlines()) < 300
