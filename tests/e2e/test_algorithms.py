"""Algorithms that need more than rewards, in every mode: critics and teachers take part, learn or teach, and are there again
after a resume."""

import asyncio
import json
import subprocess
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
        assert load_file(saved)["score.weight"].any(), "the critic has learned something"


@pytest.mark.parametrize("mode", ["colocate", "fully_async"])
def test_a_policy_waits_while_its_critic_warms_up(configure: Callable[..., RunConfig], tiny_model: Path, mode: str) -> None:
    warm_up = ["critic.warmup_steps=2", "train.checkpoint.every=1", "train.checkpoint.keep=9", "train.num_steps=3"]
    config = configure(*ALGORITHMS["ppo"], *MODES[mode], *warm_up)
    rows = run(config)
    assert [row["grad_norm"] > 0 for row in rows] == [False, False, True]
    assert ["pg_loss" in row for row in rows] == [False, False, True]
    folder = Path(config.run.dir) / config.run.name
    before = load_file(tiny_model / "model.safetensors")
    for step, is_same in ((1, True), (2, True), (3, False)):
        after = load_file(folder / "checkpoints" / f"step_{step}" / "actor" / "weights.safetensors")
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items()) is is_same
        place = folder / "checkpoints" / f"step_{step}" / "critic" if mode == "colocate" else folder / "critic" / f"step_{step}"
        assert load_file(place / "weights.safetensors")["score.weight"].any()


@pytest.mark.parametrize("mode", ["colocate", "fully_async"])
def test_a_resumed_critic_is_the_one_that_was_saved(configure: Callable[..., RunConfig], mode: str) -> None:
    """Four steps are, to the last bit, two and two more."""
    exact = ["run.deterministic=true", "rollout.max_staleness=0", f"resources.mode={mode}", "train.checkpoint.every=2"]
    steps = {"whole": [4], "halves": [2, 4]}
    weights = {}
    for name, ends in steps.items():
        for start, end in zip([None, *ends], ends, strict=False):
            config = configure(*ALGORITHMS["ppo"], *exact, f"train.num_steps={end}", f"run.name={name}")
            rows = run(config, start)
        assert len(rows) == 4
        folder = Path(config.run.dir) / name
        critic = folder / ("checkpoints/step_4/critic" if mode == "colocate" else "critic/step_4")
        weights[name] = load_file(folder / "hf" / "model.safetensors") | load_file(critic / "weights.safetensors")
    assert weights["whole"].keys() == weights["halves"].keys()
    assert all(torch.equal(weights["halves"][name], tensor) for name, tensor in weights["whole"].items())


@pytest.mark.parametrize(("algorithm", "target"), [("ppo", "critic"), ("ppo", "actor"), ("opd", "teacher")])
def test_one_of_them_dies_and_the_run_goes_on(configure: Callable[..., RunConfig], algorithm: str, target: str) -> None:
    fault = f'faults.events=[{{ kind = "kill", target = "{target}", step = 3 }}]'
    config = configure(*ALGORITHMS[algorithm], *MODES["fully_async"], fault, "train.num_steps=7", "train.checkpoint.every=2")
    rows = run(config)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert rows[-1]["restarts/total"] >= 1
    if algorithm == "ppo":
        steps = [int(path.name.removeprefix("step_")) for path in Path(config.run.dir).glob("*/critic/step_*")]
        assert max(steps) >= 6, "but for what was under way when it died, it has learned from everything"


@pytest.mark.parametrize("whiten", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_critic_of_its_own_learns_what_one_in_the_actor_learns(run_file: RunFile, tmp_path: Path, whiten: bool) -> None:
    settings = ["algorithm.type=ppo", "critic.lr=1e-2", f"algorithm.whiten={str(whiten).lower()}", "algorithm.kl.coef=0.05"]
    command = [sys.executable, "-m", "relax.cli.main", "parity", str(run_file()), "--steps", "8", *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal, bit by bit") == 3


HALF_FORESEEN = '''
def half_foreseen(prompt, response, answer, metadata):
    """Half of it is the prompt's, as a critic can see before the first token; the other half the policy can raise."""
    return (len(answer) > 2) / 2 + sum("a" <= c <= "m" for c in response) / max(1, len(response)) / 2
'''


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hybrid", "fully_async"])
def test_ppo_learns_with_a_critic_that_explains_its_returns(
    configure: Callable[..., RunConfig], tmp_path: Path, mode: str
) -> None:
    """At a tenth of the other tests' rate: there, Adam's steps are as large as the weights, and any critic says a constant."""
    (tmp_path / "foreseen.py").write_text(HALF_FORESEEN)
    slowly = ["reward.path=foreseen:half_foreseen", "train.num_steps=120", "critic.lr=1e-3", "critic.warmup_steps=3"]
    rows = run(configure(*ALGORITHMS["ppo"], *MODES[mode], *slowly))
    assert mean(rows[-10:], "reward/mean") > mean(rows[:10], "reward/mean") + 0.1
    late = [row for row in rows[-20:] if "value_loss" in row]
    explained = 1 - (mean(late, "value/error/std") / mean(late, "return/std")) ** 2
    assert explained > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate", "fully_async"])
@pytest.mark.parametrize("algorithm", ["opd", "opd_full"])
def test_a_student_comes_closer_to_its_teacher(configure: Callable[..., RunConfig], algorithm: str, mode: str) -> None:
    """The teacher has learned what the reward wants; the student, which is shown no reward, wants the same in the end. (Random
    models are no teachers: they all find every token about as likely, so there is nothing to come closer to.)"""
    schooling = configure(*MODES["colocate"], "train.num_steps=60", "run.name=teacher")
    assert mean(run(schooling)[-5:], "reward/mean") > 0.9
    teacher = f"teacher.model.path={Path(schooling.run.dir) / 'teacher' / 'hf'}"
    rows = run(configure(*ALGORITHMS[algorithm], *MODES[mode], teacher, "train.num_steps=60"))
    name = "teacher_kl" if algorithm == "opd" else "loss"
    assert mean(rows[:5], name) > 1
    assert 0 < mean(rows[-5:], name) < 0.1
    assert mean(rows[:5], "reward/mean") < 0.5
    assert mean(rows[-5:], "reward/mean") > 0.9
