"""Whole runs in virtual time keep their promises, whatever befalls them: age, exactly once, conservation, an end."""

import asyncio
import bisect
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from simulation import virtual_time
from simulation.roles import SimActor
from simulation.run import Run, simulate
from simulation.scenario import FAULTS, Scenario, draw

from relax.bus.core import Core

QUICK, MANY = range(24), range(1000, 1400)


def test_time_jumps_and_is_the_same_every_time() -> None:
    async def work() -> list[float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600)
        first = loop.time()
        await asyncio.gather(*(asyncio.sleep(pause) for pause in (5, 1, 3)))
        return [first, loop.time(), await asyncio.to_thread(loop.time)]

    found = [virtual_time.run(work(), 1e6) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(3600)
    assert found[0][2] == pytest.approx(3605)


def test_a_run_that_hangs_ends_at_the_deadline() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        virtual_time.run(work(), 1e9)


@pytest.mark.parametrize("seed", QUICK)
def test_a_run_keeps_its_promises(seed: int, tmp_path: Path) -> None:
    simulate(draw(seed, num_steps=16), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_samples_keep_the_promises(tmp_path: Path) -> None:
    num_samples = num_faults = 0
    ages: Counter[int] = Counter()
    for seed in MANY:
        run = simulate(draw(seed, num_steps=40), tmp_path / str(seed))
        num_samples += run.judge.num_samples
        num_faults += run.num_faults
        ages += run.judge.ages
    assert num_samples >= 100_000
    assert num_faults >= 1000
    assert max(ages) <= 4


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("bound", [0, 2])
def test_each_fault_alone_is_survived(fault: str, bound: int, tmp_path: Path) -> None:
    scenario = Scenario(7, max_staleness=bound, faults=(fault,), most_faults=8, num_steps=10, skips=0.2, rejects=0.1)
    run = simulate(scenario, tmp_path)
    assert run.num_faults > 0


def test_what_is_trained_is_distributed_as_what_is_asked(tmp_path: Path) -> None:
    """With "wait" every prompt that is begun is trained, however long its answers are: the very same lengths."""
    for seed, bound in enumerate((0, 1, 2, 4)):
        run = simulate(_long_tailed(seed, bound, "wait", filtered=0.2), tmp_path / str(bound))
        trained, asked = run.judge.lengths()
        assert trained == asked
        assert run.judge.num_dropped == 0


def test_drop_leaves_out_what_takes_long(tmp_path: Path) -> None:
    """The price of "drop": groups of long answers are too old when they come, and the prompt's next ones are shorter."""
    run = simulate(_long_tailed(3, 1, "drop", redraws=True), tmp_path)
    trained, asked = run.judge.lengths()
    assert run.judge.num_dropped > 0
    assert sum(trained) / len(trained) < 0.97 * sum(asked) / len(asked)
    assert _distance(trained, asked) > 0.02


def test_mask_trains_the_young_tokens_of_what_takes_long(tmp_path: Path) -> None:
    run = simulate(_long_tailed(3, 1, "mask"), tmp_path)
    assert run.judge.num_tokens_masked > 0
    assert max(run.judge.ages) <= 1


def test_a_dead_actor_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    run = SimActor.run

    async def watched(self: SimActor) -> None:
        try:
            await run(self)
        finally:
            left.extend(task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("publication"))

    monkeypatch.setattr(SimActor, "run", watched)
    scenario = Scenario(1, max_staleness=4, skips=0.8, faults=("kill_actor",), most_faults=10, num_steps=20)
    assert simulate(scenario, tmp_path).num_faults == 10
    assert left == []


def test_the_judge_sees_a_queue_that_breaks_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is told a larger bound than was promised: the simulation has to find that out."""
    scenario = Scenario(1, max_staleness=1, num_steps=8)
    opened = Run._open_core

    def open_loosely(self: Run, *, fresh: bool) -> None:
        self.limits = replace(self.limits, max_staleness=3)
        opened(self, fresh=fresh)

    monkeypatch.setattr(Run, "_open_core", open_loosely)
    with pytest.raises(AssertionError, match="age 2"):
        simulate(scenario, tmp_path)


def test_the_judge_sees_a_run_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Core, "acknowledge", _swallowed)
    with pytest.raises(AssertionError, match="hangs"):
        simulate(Scenario(1, num_steps=4), tmp_path)


def _long_tailed(seed: int, bound: int, on_stale: str, **more: float) -> Scenario:
    """Mean generation of half a step, slowest ones of several steps."""
    return Scenario(
        seed, max_staleness=bound, on_stale=on_stale, tail=1.2, token_s=0.03, group_size=2, num_steps=30, **more
    )  # fmt: skip


def _distance(one: list[int], other: list[int]) -> float:
    """Kolmogorov and Smirnov's: the largest gap between the two distributions."""
    shares = [[bisect.bisect_right(values, at) / len(values) for at in {*one, *other}] for values in (one, other)]
    return max(abs(a - b) for a, b in zip(*shares, strict=True))


async def _swallowed(self: Core, subscriber: str, version: int) -> None:
    """An acknowledgement that never arrives."""
