"""Algorithms that need more than rewards, in every mode: critics and teachers take part, learn or teach, and are there again
after a resume."""

import asyncio
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from relax.config import RunConfig, load_config
from relax.control.controller import Controller
from relax.control.inprocess import InProcessRuntime
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder

RunFile = Callable[..., Path]
pytestmark = pytest.mark.timeout(600)  # a busy machine takes several times as long

ALGORITHMS = {
    "ppo": ["algorithm.type=ppo", "critic.lr=1e-2"],
    "ppo, not whitened": ["algorithm.type=ppo", "algorithm.whiten=false", "critic.lr=1e-2", "algorithm.kl.coef=0.01"],
    "opd": ["algorithm.type=opd"],
    "opd_full": ["algorithm.type=opd_full", "algorithm.top_k=8"],
    "reinforce_pp": ["algorithm.type=reinforce_pp"],
    "custom": ["algorithm.type=custom", "algorithm.path=functions:centred", "algorithm.scope=batch"],
    "custom critic": [
        *("algorithm.type=custom", "algorithm.path=functions:less_value", "critic.lr=1e-2"),
        'algorithm.needs=["values", "ref_logprobs"]',
    ],
    "custom critic of whole steps": [
        *("algorithm.type=custom", "algorithm.path=functions:less_value", "algorithm.scope=batch"),
        'algorithm.needs=["values", "old_logprobs"]',
    ],
}
MODES = {
    "colocate": ["resources.mode=colocate", "rollout.max_staleness=0"],
    "hybrid": ["resources.mode=hybrid", "rollout.max_staleness=1"],
    "fully_async": ["resources.mode=fully_async", "rollout.max_staleness=2"],
}
LIVELY = ["train.lr=3e-3", "eval.num_prompts=1", "observe.progress=false", "observe.tensorboard=false"]


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's."""
    module = types.ModuleType("functions")

    def less_value(given):
        rewards = given.spread(given.rewards)
        return {"advantages": rewards - given.columns["values"], "returns": rewards}

    module.less_value = less_value
    module.centred = lambda given: given.spread(given.rewards - given.rewards.mean())
    monkeypatch.setitem(sys.modules, "functions", module)


@pytest.fixture
def configure(run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: Path) -> Callable[..., RunConfig]:
    """`configure(*overrides)`: a run of the tiny model on letters, with another tiny model as its teacher."""
    monkeypatch.chdir(tmp_path)  # where the reward is found
    path = run_file()
    return lambda *overrides: load_config(path, [*LIVELY, f"teacher.model.path={teacher}", *overrides])


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from relax.models.tiny import build_tiny_model

    folder = tmp_path_factory.mktemp("models") / "teacher"
    build_tiny_model(
        folder, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512, seed=5
    )
    return folder


def run(config: RunConfig, resume: int | None = None) -> list[dict[str, float]]:
    """Trains, from the checkpoint of step `resume` if given; the rows of metrics."""
    torch.set_num_threads(1)
    run_dir = Path(config.run.dir) / config.run.name
    run_dir.mkdir(parents=True, exist_ok=True)
    recorder = RunRecorder(run_dir, config.observe, resume_step=resume or 0)
    controller = Controller(config, run_dir, InProcessRuntime(config), recorder, Progress(config), resume or 0)
    path = None if resume is None else run_dir / "checkpoints" / f"step_{resume}"
    try:
        asyncio.run(asyncio.wait_for(controller.run(path), 500))
    finally:
        recorder.close()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def mean(rows: list[dict[str, float]], name: str) -> float:
    found = [row[name] for row in rows if name in row]
    return sum(found) / len(found)


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_runs_in_every_mode(configure: Callable[..., RunConfig], algorithm: str, mode: str) -> None:
    config = configure(*ALGORITHMS[algorithm], *MODES[mode], "train.num_steps=4", "train.checkpoint.every=0")
    rows = run(config)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["samples"] == 32 and row["grad_norm"] > 0 and row["skipped"] == 0 for row in rows)
    assert ("teacher_kl" in rows[-1]) == (algorithm == "opd")
    has_critic = "ppo" in algorithm or "critic" in algorithm
    assert any("value_loss" in row for row in rows) == has_critic
    if has_critic:
        saved = next((Path(config.run.dir) / config.run.name).glob("**/critic/**/weights.safetensors"))
        assert load_file(saved)["value_head.weight"].any(), "the critic has learned something"
