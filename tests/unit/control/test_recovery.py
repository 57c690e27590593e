"""Roles, engines and the queue die in the middle of whole runs on engines and back ends that compute nothing; the runs end
with the right number of steps, and their ledgers close."""

import asyncio
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeBackend, FakeEngine

from relax.config import RunConfig, make_config
from relax.control.controller import Controller, RunResult
from relax.control.inprocess import InProcessRuntime
from relax.errors import BusGone, DataError, EngineError, RoleError
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder
from relax.observe.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("rewards_without_workers")
STEPS, GROUPS = 12, 4


class Unhurried(FakeBackend):
    """Steps that take long enough for the controller to look in between."""

    def finish_step(self) -> dict[str, float]:
        time.sleep(0.015)
        return super().finish_step()


class Run:
    """One run: its controller, and every engine and back end that was made for it, in order."""

    def __init__(self, folder: Path, tiny_model: Path, *overrides: str) -> None:
        raw = {
            "run": {"name": "fake", "dir": str(folder), "runtime": "inprocess"},
            "model": {"path": str(tiny_model)},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition", "size": 50},
            "reward": {"type": "format", "pattern": "[a-m].*"},
            "train": {"num_steps": STEPS},
            "rollout": {"group_size": 2, "prompts_per_step": GROUPS, "max_new_tokens": 6},
            "services": {"restart_backoff_s": 0.01},
            "observe": {"progress": False, "tensorboard": False},
        }
        self.config: RunConfig = make_config(raw, overrides)
        self.folder = folder / "fake"
        self.folder.mkdir(exist_ok=True)
        self.engines: list[FakeEngine] = []
        self.backends: list[FakeBackend] = []
        self.notes: list[str] = []
        self.break_backend: Callable[[FakeBackend], None] = lambda backend: None
        self.runtime = InProcessRuntime(self.config, self._backend, self._engine)
        progress = Progress(self.config)
        progress.note = self.notes.append  # type: ignore[method-assign]
        recorder = RunRecorder(self.folder, self.config.observe)
        self.controller = Controller(self.config, self.folder, self.runtime, recorder, progress, watch_s=0.02)

    def _engine(self, config: RunConfig, name: str) -> FakeEngine:
        self.engines.append(FakeEngine(delay_s=0.001))
        return self.engines[-1]

    def _backend(self, config: RunConfig) -> FakeBackend:
        self.backends.append(Unhurried())
        self.break_backend(self.backends[-1])
        return self.backends[-1]

    async def finish(self) -> RunResult:
        try:
            return await asyncio.wait_for(self.controller.run(), 60)
        finally:
            self.controller.recorder.close()

    def recoveries(self) -> list[str]:
        return [event["role"] for event in RunFolder(self.folder).events() if event["kind"] == "recovery"]

    def trained(self) -> dict[int, list[int]]:
        """Prompts by the step that trained them, from the ledger."""
        with sqlite3.connect(self.folder / "ledger.sqlite") as ledger:
            found = ledger.execute("SELECT step, prompt FROM issues WHERE fate = 'trained'").fetchall()
        ledger.close()
        steps: dict[int, list[int]] = {}
        for step, prompt in found:
            steps.setdefault(step, []).append(prompt)
        return steps

    def assert_whole(self) -> None:
        """Every step in the record once, of whole batches; every prompt trained once."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert all(row["samples"] == 2 * GROUPS for row in rows)
        assert all(value >= 0 for row in rows for name, value in row.items() if name.startswith(("tokens/", "wait/", "groups")))
        trained = self.trained()
        assert {step: len(prompts) for step, prompts in trained.items()} == dict.fromkeys(range(STEPS), GROUPS)
        prompts = Counter(prompt for step in trained.values() for prompt in step)
        assert max(prompts.values()) == 1
        if self.config.faults.random_kills == 0:
            assert set(prompts) == set(range(STEPS * GROUPS)), "the prompts of a run in which nothing dies"


def kill(*targets: str, first: int = 2, every: int = 3) -> str:
    events = (f'{{kind="kill", target="{target}", step={first + every * n}}}' for n, target in enumerate(targets))
    return f"faults.events=[{', '.join(events)}]"


@pytest.mark.parametrize("target", ["rollout", "advantages", "engine-0"])
async def test_a_role_or_engine_that_dies_twice_is_restarted_in_place(tmp_path, tiny_model, target):
    run = Run(tmp_path, tiny_model, kill(target, target))
    result = await run.finish()
    assert result.step == STEPS
    assert run.recoveries() == [target, target]
    run.assert_whole()
    assert len(run.backends) == 1, "the actor goes on"
    assert run.engines[-1].weights[STEPS] == STEPS


async def test_one_of_several_engines_dies_and_the_others_go_on(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, kill("engine-1", "engine-0"), "rollout.num_engines=2")
    await run.finish()
    assert run.recoveries() == ["engine-1", "engine-0"]
    assert len(run.engines) == 4
    run.assert_whole()


async def test_reference_and_actor_fwd_are_restarted_in_place(tmp_path, tiny_model):
    overrides = ["algorithm.kl.coef=0.1", "algorithm.old_logprobs=recompute"]
    run = Run(tmp_path, tiny_model, kill("reference", "actor_fwd"), *overrides)
    await run.finish()
    assert run.recoveries() == ["reference", "actor_fwd"]
    run.assert_whole()


@pytest.mark.parametrize(("every", "back_to"), [(0, 0), (2, 4)])
async def test_the_actor_goes_back_and_every_prompt_is_trained_once(tmp_path, tiny_model, every, back_to):
    run = Run(tmp_path, tiny_model, kill("actor", first=5), f"train.checkpoint.every={every}")
    await run.finish()
    assert run.recoveries() == ["actor"]
    run.assert_whole()
    rewinds = [event["step"] for event in RunFolder(run.folder).events() if event["kind"] == "rewind"]
    assert len(rewinds) == 1
    assert rewinds[0] >= back_to
    first, second = run.backends
    assert len(second.steps) == STEPS - rewinds[0]
    assert float(second.weight[0]) == STEPS
    assert len(first.steps) >= 5
    assert run.engines[0].weights[STEPS] == STEPS, "the engine took lower versions again, and then the last"
    with sqlite3.connect(run.folder / "ledger.sqlite") as ledger:
        reasons = [row[0] for row in ledger.execute("SELECT DISTINCT reason FROM issues WHERE fate = 'dropped'")]
    ledger.close()
    assert reasons
    assert all("trainer" in reason for reason in reasons), reasons


async def test_who_asks_for_the_end_of_what_is_being_ended_waits_for_it(tmp_path, tiny_model):
    """A fault ends the actor, and so does its recovery: what it has under way may not be heard of after the rewind."""
    run = Run(tmp_path, tiny_model)
    await run.runtime.start(run.folder, None)
    role, may_end = run.runtime._tasks["actor"].role, asyncio.Event()
    stop = role.stop

    async def stop_late() -> None:
        await may_end.wait()
        await stop()

    role.stop = stop_late
    ends = [asyncio.create_task(run.runtime.end("actor")) for _ in range(2)]
    assert not (await asyncio.wait(ends, timeout=0.1))[0]
    may_end.set()
    await asyncio.gather(*ends)
    await run.runtime.stop()


async def test_an_actor_that_dies_again_and_again_still_comes_to_the_end(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, kill("actor", "actor", "actor", first=2, every=2), "train.checkpoint.every=2")
    await run.finish()
    assert run.recoveries() == ["actor"] * 3
    run.assert_whole()


async def test_an_actor_that_fails_is_restarted_as_one_that_died(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, "train.checkpoint.every=2")

    def fail_once(backend: FakeBackend) -> None:
        if len(run.backends) > 1:
            return
        finish = backend.finish_step

        def finish_step() -> dict[str, float]:
            if len(backend.steps) == 5:
                raise RuntimeError("the device fell off the bus")
            return finish()

        backend.finish_step = finish_step

    run.break_backend = fail_once
    await run.finish()
    assert run.recoveries() == ["actor"]
    assert any("actor: RuntimeError: the device fell off the bus: actor is restarted" in note for note in run.notes)
    run.assert_whole()


async def test_a_budget_that_is_used_up_ends_the_run_with_the_first_error(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, "services.max_restarts=2")

    def always_fail(backend: FakeBackend) -> None:
        number = len(run.backends)

        def finish_step() -> dict[str, float]:
            raise RuntimeError(f"failure number {number}")

        backend.finish_step = finish_step

    run.break_backend = always_fail
    with pytest.raises(RoleError, match=r"actor: RuntimeError: failure number 1 \(3 failures in a row"):
        await run.finish()
    assert run.recoveries() == ["actor", "actor"]


async def test_an_error_that_is_the_users_ends_the_run_at_once(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model)

    def bad_data(backend: FakeBackend) -> None:
        def finish_step() -> dict[str, float]:
            raise DataError("train.jsonl:7: no such thing")

        backend.finish_step = finish_step

    run.break_backend = bad_data
    with pytest.raises(RoleError, match=r"train\.jsonl:7: no such thing"):
        await run.finish()
    assert run.recoveries() == []


@pytest.mark.parametrize("every", [0, 3])
async def test_a_lost_queue_starts_everything_again(tmp_path, tiny_model, every):
    run = Run(tmp_path, tiny_model, kill("queue", first=5), f"train.checkpoint.every={every}")
    result = await run.finish()
    assert result.num_restarts == 1
    assert run.recoveries() == ["queue"]
    run.assert_whole()


async def test_a_queue_that_cannot_come_back_ends_the_run_with_the_first_error(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, kill("queue", first=5), "services.max_restarts=2")
    start = run.runtime.start

    async def start_once(run_dir: Path, resume: Path | None) -> None:
        if run.controller.is_started:
            raise BusGone("no room for another")
        await start(run_dir, resume)

    run.runtime.start = start_once  # type: ignore[method-assign]
    with pytest.raises(RoleError, match=r"transfer queue is closed \(3 failures in a row"):
        await run.finish()


async def test_an_engine_that_refuses_publications_catches_up(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, 'faults.events=[{kind="fail_sync", target="engine-0", step=3, count=2}]')
    await run.finish()
    events = RunFolder(run.folder).events()
    assert sum(bool(event.get("rejected")) for event in events if event["kind"] == "weights") == 2
    assert [event["fault"] for event in events if event["kind"] == "fault"] == ["fail_sync"]
    run.assert_whole()


async def test_an_engine_that_takes_no_weights_any_more_is_replaced(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, 'faults.events=[{kind="fail_sync", target="engine-0", step=3, count=5}]')
    await run.finish()
    assert run.recoveries() == ["engine-0"]
    run.assert_whole()


async def test_calls_that_are_held_up_change_nothing(tmp_path, tiny_model):
    fault = '{kind="delay", target="advantages", step=2, seconds=0.03, count=20, probability=0.5}'
    run = Run(tmp_path, tiny_model, f"faults.events=[{fault}]")
    await run.finish()
    assert run.recoveries() == []
    run.assert_whole()


async def test_kills_at_random(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, "faults.random_kills=6", "train.checkpoint.every=2", "rollout.max_staleness=2")
    await run.finish()
    assert len(run.recoveries()) >= 5
    run.assert_whole()


@pytest.mark.parametrize("mode", ["colocate", "hybrid"])
async def test_other_modes_recover_as_well(tmp_path, tiny_model, mode):
    overrides = [f"resources.mode={mode}", "rollout.max_staleness=0", "train.checkpoint.every=2"]
    run = Run(tmp_path, tiny_model, kill("engine-0", "actor", "rollout"), *overrides)
    await run.finish()
    assert run.recoveries() == ["engine-0", "actor", "rollout"]
    run.assert_whole()


async def test_a_run_in_which_nothing_moves_ends_with_who_is_waited_for(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, "services.progress_timeout_s=0.3")

    def hang(backend: FakeBackend) -> None:
        finish = backend.finish_step

        def finish_step() -> dict[str, float]:
            if len(backend.steps) == 3:
                time.sleep(1.5)
            return finish()

        backend.finish_step = finish_step

    run.break_backend = hang
    with pytest.raises(RoleError, match=r"no step ended.*services\.progress_timeout_s = 0\.3") as found:
        await run.finish()
    assert "actor: step 3: optimizer" in str(found.value)


async def test_stopping_in_the_middle_of_a_recovery_leaves_nothing_behind(tmp_path, tiny_model):
    run = Run(tmp_path, tiny_model, kill("engine-0"), "services.restart_backoff_s=30")
    make = run.runtime._make_engine

    def never_again(config: RunConfig, name: str) -> FakeEngine:
        if run.controller.is_started:
            raise EngineError("out of memory")
        return make(config, name)

    run.runtime._make_engine = never_again
    task = asyncio.create_task(run.controller.run())
    while not any("in 30 s" in note for note in run.notes):
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    run.controller.recorder.close()
    assert not {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("relax-")}
