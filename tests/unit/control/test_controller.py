"""The whole loop on real roles and a real queue, with an engine and a back end that compute nothing; once with real rewards."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeBackend, FakeEngine

from relax.config import RunConfig, make_config
from relax.control.controller import Controller, RunResult
from relax.control.inprocess import InProcessRuntime
from relax.errors import RoleError
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder

Start = Callable[..., tuple[Controller, FakeEngine, FakeBackend]]
without_workers = pytest.mark.usefixtures("rewards_without_workers")


def config_of(tmp_path: Path, tiny_model: Path, *overrides: str) -> RunConfig:
    raw = {
        "run": {"name": "fake", "dir": str(tmp_path), "runtime": "inprocess"},
        "model": {"path": str(tiny_model)},
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition", "size": 50},
        "reward": {"type": "format", "pattern": "[a-m].*"},
        "train": {"num_steps": 8},
        "rollout": {"group_size": 2, "prompts_per_step": 4, "max_new_tokens": 6},
        "observe": {"progress": False, "tensorboard": False},
    }
    return make_config(raw, overrides)


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Start:
    def make(
        *overrides: str, delay_s: float = 0.0, resume_step: int | None = None
    ) -> tuple[Controller, FakeEngine, FakeBackend]:
        config = config_of(tmp_path, tiny_model, *overrides)
        engine, backend = FakeEngine(delay_s), FakeBackend()
        runtime = InProcessRuntime(config, lambda config: backend, lambda config, name: engine)
        run_dir = tmp_path / "fake"
        run_dir.mkdir(exist_ok=True)
        recorder = RunRecorder(run_dir, config.observe, resume_step=resume_step)
        return Controller(config, run_dir, runtime, recorder, Progress(config)), engine, backend

    return make


def rows(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "fake" / "metrics.jsonl").read_text().splitlines()]


async def finish(controller: Controller, resume: Path | None = None) -> RunResult:
    try:
        return await asyncio.wait_for(controller.run(resume), 30)
    finally:
        controller.recorder.close()


@pytest.mark.parametrize("bound", [0, 1, 3])
async def test_every_step_trains_whole_groups_once_within_the_bound(start: Start, tmp_path: Path, bound: int) -> None:
    controller, engine, backend = start(f"rollout.max_staleness={bound}", delay_s=0.002)
    result = await finish(controller)
    assert result.step == 8
    assert [len(groups) for groups in backend.steps] == [4] * 8
    trained = [group for groups in backend.steps for group in groups]
    assert len(trained) == len(set(trained)) == 32
    ages = [row["age/max"] for row in rows(tmp_path)]
    assert max(ages) <= bound
    assert engine.weights[8] == 8.0, "the engine ends with the last version, byte for byte"
    with sqlite3.connect(tmp_path / "fake" / "ledger.sqlite") as ledger:
        assert ledger.execute("select count(*) from issues where fate = 'trained'").fetchone() == (32,)


@without_workers
async def test_failed_groups_give_their_place_back(start: Start, tmp_path: Path) -> None:
    controller, engine, backend = start("rollout.max_failed_in_a_row=10")
    engine.fail_next = 5
    await finish(controller)
    assert [len(groups) for groups in backend.steps] == [4] * 8
    with sqlite3.connect(tmp_path / "fake" / "ledger.sqlite") as ledger:
        fates = dict(ledger.execute("select fate, count(*) from issues group by fate"))
    assert fates == {"trained": 32, "failed": 5}


@without_workers
async def test_failures_in_a_row_end_the_run_with_the_first_error(start: Start) -> None:
    controller, engine, _ = start("rollout.max_failed_in_a_row=3")
    engine.fail_next = 1000
    with pytest.raises(RoleError, match=r"\d+ groups failed .*told to fail"):
        await finish(controller)


@without_workers
async def test_a_group_that_the_queue_can_never_hold_is_a_failed_one(start: Start) -> None:
    controller, _, _ = start("rollout.max_failed_in_a_row=3", "services.queue_max_bytes=65536", "rollout.group_size=512")
    with pytest.raises(RoleError, match=r"\d+ groups failed .*the queue holds 65536 .services\.queue_max_bytes"):
        await finish(controller)


@without_workers
async def test_a_rejected_version_is_offered_again_and_never_counts(start: Start) -> None:
    controller, engine, _ = start("rollout.max_staleness=0")
    engine.reject_next = 2
    result = await finish(controller)
    assert result.step == 8
    assert engine.weights[8] == 8.0


@without_workers
async def test_resume_continues_from_the_checkpoint_with_every_prompt_once(start: Start, tmp_path: Path) -> None:
    first, _, before = start("train.num_steps=4", "train.checkpoint.every=2", delay_s=0.001)
    await finish(first)
    checkpoint = tmp_path / "fake" / "checkpoints" / "step_4"
    second, engine, after = start("train.num_steps=7", delay_s=0.001)
    result = await finish(second, checkpoint)
    assert result.step == 7
    assert engine.weights[4] == 4.0, "the engine begins with the checkpoint's weights"
    assert len(after.steps) == 3
    trained = [group for groups in before.steps + after.steps for group in groups]
    assert len(trained) == len(set(trained)) == 28


@without_workers
async def test_steps_that_nobody_recorded_are_taken_from_the_checkpoint(start: Start, tmp_path: Path) -> None:
    first, _, _ = start("train.num_steps=4", "train.checkpoint.every=4")
    await finish(first)
    recorded = rows(tmp_path)
    metrics = tmp_path / "fake" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))  # killed before it wrote the other two
    second, _, _ = start("train.num_steps=6", resume_step=4)
    await finish(second, tmp_path / "fake" / "checkpoints" / "step_4")
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["reward/mean"] for row in found[:4]] == [row["reward/mean"] for row in recorded]


@without_workers
async def test_cancelling_stops_everything(start: Start) -> None:
    controller, _, backend = start("train.num_steps=100000", delay_s=0.001)
    task = asyncio.create_task(controller.run())
    while len(backend.steps) < 3:
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    controller.recorder.close()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not {name for name in names if name.startswith("relax-")}
