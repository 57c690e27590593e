"""Every mode and every way to treat stale samples: whole steps, ages within the bound, each prompt once, nothing hangs."""

import asyncio
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeBackend, FakeEngine

from relax.config import RunConfig, make_config
from relax.control.controller import Controller, RunResult
from relax.control.inprocess import InProcessRuntime
from relax.errors import EngineError
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder
from relax.train.backend import StepSums, TrainBatch
from relax.types import GenerateRequest, Sampling

pytestmark = pytest.mark.usefixtures("rewards_without_workers")
NUM_STEPS, SIZE = 9, 4


class SleepyEngine(FakeEngine):
    """Notes when it generates and when it sleeps."""

    def __init__(self) -> None:
        super().__init__(delay_s=0.002)
        self.num_sleeps = 0

    async def sleep(self) -> None:
        await super().sleep()
        self.num_sleeps += 1


class TurnBackend(FakeBackend):
    """Notes the state of the engine while it trains, and the tokens that it was given to train on."""

    def __init__(self, engine: SleepyEngine) -> None:
        super().__init__()
        self.engine = engine
        self.versions_while_training: set[int] = set()
        self.has_ref = self.has_old = True
        self.num_trained_tokens = 0

    def forward_backward(self, batch: TrainBatch) -> StepSums:
        self.versions_while_training.add(self.engine.version)
        self.has_ref &= batch.ref_logprobs is not None
        self.has_old &= batch.old_logprobs is not None
        self.num_trained_tokens += int(batch.loss_mask.values.sum())
        return super().forward_backward(batch)


def config_of(tmp_path: Path, tiny_model: Path, *overrides: str) -> RunConfig:
    raw = {
        "run": {"name": "fake", "dir": str(tmp_path), "runtime": "inprocess"},
        "model": {"path": str(tiny_model)},
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition", "size": 50},
        "reward": {"type": "format", "pattern": "[a-m].*"},
        "train": {"num_steps": NUM_STEPS},
        "rollout": {"group_size": 2, "prompts_per_step": SIZE, "max_new_tokens": 8},
        "observe": {"progress": False, "tensorboard": False},
    }
    return make_config(raw, overrides)


async def run(tmp_path: Path, tiny_model: Path, *overrides: str) -> tuple[RunResult, SleepyEngine, TurnBackend, list[dict]]:
    config = config_of(tmp_path, tiny_model, *overrides)
    engine = SleepyEngine()
    backend = TurnBackend(engine)
    others = [FakeBackend() for _ in range(2)]
    made = [backend] if config.resources.mode != "fully_async" else [*others, backend]
    needs = (config.algorithm.kl.coef > 0) + (config.algorithm.old_logprobs == "recompute")
    made = made[-1 - needs :] if config.resources.mode == "fully_async" else made
    runtime = InProcessRuntime(config, lambda _: made.pop(0), lambda _config, _name: engine)
    run_dir = tmp_path / "fake"
    run_dir.mkdir(exist_ok=True)
    controller = Controller(config, run_dir, runtime, RunRecorder(run_dir, config.observe), Progress(config))
    try:
        result = await asyncio.wait_for(controller.run(), 40)
    finally:
        controller.recorder.close()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return result, engine, backend, rows


def fates(tmp_path: Path) -> dict[str, int]:
    with sqlite3.connect(tmp_path / "fake" / "ledger.sqlite") as ledger:
        return dict(ledger.execute("select fate, count(*) from issues group by fate"))


COLUMNS = ["algorithm.kl.coef=0.1", "algorithm.old_logprobs=recompute"]


@pytest.mark.parametrize(
    ("mode", "bound"), [("colocate", 0), ("hybrid", 0), ("hybrid", 2), ("fully_async", 0), ("fully_async", 2)]
)
async def test_every_mode_trains_whole_steps_with_every_column(tmp_path: Path, tiny_model: Path, mode: str, bound: int) -> None:
    overrides = [f"resources.mode={mode}", f"rollout.max_staleness={bound}", *COLUMNS]
    result, engine, backend, rows = await run(tmp_path, tiny_model, *overrides)
    assert result.step == NUM_STEPS
    assert [len(set(groups)) for groups in backend.steps] == [SIZE] * NUM_STEPS
    assert max(row["age/max"] for row in rows) <= bound
    assert backend.has_ref
    assert backend.has_old
    assert fates(tmp_path) == {"trained": SIZE * NUM_STEPS}
    assert engine.weights[NUM_STEPS] == NUM_STEPS, "the engine ends with the last version"


async def test_engines_sleep_while_the_actor_trains_and_only_then(tmp_path: Path, tiny_model: Path) -> None:
    evaluation = [
        "eval.data.type=generator",
        "eval.data.path=relax.data.arithmetic:addition",
        "eval.every=2",
        "eval.num_prompts=8",
    ]
    _, engine, backend, rows = await run(
        tmp_path, tiny_model, "resources.mode=colocate", "rollout.max_staleness=0", *evaluation
    )
    assert backend.versions_while_training == {-1}, "no weights in the engine while the actor trains"
    assert engine.num_sleeps == NUM_STEPS
    assert engine.weights[NUM_STEPS] == NUM_STEPS, "awake at the end"
    assert {row["age/max"] for row in rows} == {0}
    assert len((tmp_path / "fake" / "eval.jsonl").read_text().splitlines()) >= 2


async def test_a_sleeping_engine_refuses_to_generate() -> None:
    engine = FakeEngine()
    engine.version = 3
    await engine.sleep()
    with pytest.raises(EngineError):
        await engine.generate(GenerateRequest("r", (1,), (2,), Sampling(4)))


@pytest.mark.parametrize(("updates", "publish", "bound"), [(2, 1, 1), (1, 3, 2), (2, 2, 3), (2, 2, 5)])
async def test_updates_and_unpublished_steps_count_in_the_age(
    tmp_path: Path, tiny_model: Path, updates: int, publish: int, bound: int
) -> None:
    overrides = [f"train.updates_per_step={updates}", f"train.publish_every={publish}", f"rollout.max_staleness={bound}"]
    result, engine, backend, rows = await run(tmp_path, tiny_model, *overrides)
    assert result.step == NUM_STEPS
    assert len(backend.steps) == NUM_STEPS * updates
    assert max(row["age/max"] for row in rows) <= bound
    assert min(row["age/mean"] for row in rows) >= updates - 1
    published = {step * updates for step in range(0, NUM_STEPS + 1, publish)} | {NUM_STEPS * updates}
    assert set(engine.weights) <= published
    assert fates(tmp_path) == {"trained": SIZE * NUM_STEPS}


@pytest.mark.parametrize("mode", ["hybrid", "fully_async"])
@pytest.mark.parametrize("on_stale", ["drop", "mask"])
async def test_what_is_too_old_is_dropped_or_masked_and_issued_again(
    tmp_path: Path, tiny_model: Path, on_stale: str, mode: str
) -> None:
    overrides = [f"rollout.on_stale={on_stale}", "rollout.max_staleness=1", f"resources.mode={mode}"]
    result, _, backend, rows = await run(tmp_path, tiny_model, *overrides)
    assert result.step == NUM_STEPS
    assert [len(set(groups)) for groups in backend.steps] == [SIZE] * NUM_STEPS
    assert max(row["age/max"] for row in rows) <= 1
    found = fates(tmp_path)
    assert found["trained"] == SIZE * NUM_STEPS
    with sqlite3.connect(tmp_path / "fake" / "ledger.sqlite") as ledger:
        again = ledger.execute("select prompt, count(*) from issues where fate = 'trained' group by prompt").fetchall()
    assert {count for _, count in again} == {1}, "no prompt is trained twice"


@pytest.mark.parametrize("bound", [0, 1, 2])
async def test_surplus_is_kept_or_issued_again(tmp_path: Path, tiny_model: Path, bound: int) -> None:
    overrides = ["rollout.oversampling=2.0", "rollout.filter_zero_signal=true", f"rollout.max_staleness={bound}"]
    result, _, backend, rows = await run(tmp_path, tiny_model, *overrides)
    assert result.step == NUM_STEPS
    assert max(row["age/max"] for row in rows) <= bound
    trained = [group for groups in backend.steps for group in groups]
    assert len(trained) == len(set(trained)) == SIZE * NUM_STEPS
    assert fates(tmp_path)["trained"] == SIZE * NUM_STEPS


async def test_only_the_newest_version_of_a_mixed_sample_is_trained(tmp_path: Path, tiny_model: Path) -> None:
    bound = ["rollout.max_staleness=2", "rollout.group_size=4", "rollout.max_new_tokens=24"]
    _, _, plain, before = await run(tmp_path, tiny_model, *bound)
    (tmp_path / "fake" / "ledger.sqlite").unlink()
    (tmp_path / "fake" / "metrics.jsonl").unlink()
    _, _, masked, after = await run(tmp_path, tiny_model, *bound, "rollout.mask_older_versions=true")
    assert max(row["age/mixed_fraction"] for row in before) > 0
    mixed = np.mean([row["age/mixed_fraction"] for row in after])
    assert mixed > 0, "mixed samples are still generated"
    assert masked.num_trained_tokens < plain.num_trained_tokens
