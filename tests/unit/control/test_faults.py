"""Faults on purpose come when they are due, once, one kill at a time, and only to those that a run has."""

import asyncio

import pytest

from relax.config import make_config
from relax.config.faults import FaultEvent
from relax.control.faults import FaultPlan
from relax.errors import ConfigError, WeightSyncError
from relax.roles.disturbance import Disturbance, slowed


def config_with(*overrides: str):
    raw = {
        "model": {"path": "m"},
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
        "reward": {"type": "exact"},
        "train": {"num_steps": 100},
    }
    return make_config(raw, overrides)


def events(text: str) -> str:
    return f"faults.events=[{text}]"


def names(due: list[FaultEvent]) -> list[str]:
    return [event.target for event in due]


def test_a_fault_comes_once_and_waits_until_its_target_runs():
    config = config_with(events('{kind="delay", target="rollout", step=3}, {kind="fail_sync", target="engine-0", step=1}'))
    plan = FaultPlan(config)
    assert plan.due(0, 0, lambda _: True) == []
    assert names(plan.due(2, 0, lambda _: True)) == ["engine-0"]
    assert plan.due(3, 0, lambda name: name != "rollout") == []
    assert names(plan.due(3, 0, lambda _: True)) == ["rollout"]
    assert plan.due(99, 0, lambda _: True) == []


def test_the_next_kill_waits_until_the_last_one_was_noticed():
    config = config_with(events('{kind="kill", target="actor", step=1}, {kind="kill", target="queue", step=1}'))
    plan = FaultPlan(config)
    assert names(plan.due(1, 0, lambda _: True)) == ["actor"]
    assert plan.due(2, 0, lambda _: True) == []
    assert names(plan.due(2, 1, lambda _: True)) == ["queue"]


def test_a_resumed_run_does_not_suffer_again_what_it_has_behind_it():
    config = config_with(events('{kind="kill", target="actor", step=4}, {kind="kill", target="rollout", step=9}'))
    assert names(FaultPlan(config, first_step=5).due(50, 0, lambda _: True)) == ["rollout"]


def test_random_kills_are_spread_over_the_run_and_reach_everybody():
    config = config_with("faults.random_kills=10", "rollout.num_engines=2")
    seen, steps, plan = [], [], FaultPlan(config)
    for step in range(100):
        for event in plan.due(step, len(seen), lambda _: True):
            seen.append(event.target)
            steps.append(step)
    assert len(seen) == 10
    assert set(seen) == {"rollout", "advantages", "actor", "engine-0", "engine-1", "queue"}
    assert all(any(start < step <= start + 20 for step in steps) for start in range(0, 90, 10))
    other = FaultPlan(config_with("faults.random_kills=10", "rollout.num_engines=2", "faults.seed=7"))
    assert names(other.due(99, 0, lambda _: True))[0]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ('{kind="kill", target="actr"}', r"this run has .*did you mean 'actor'"),
        ('{kind="kill", target="reference"}', "this run has"),
        ('{kind="fail_sync", target="actor"}', "this run has engine-0"),
        ('{kind="kill", target="actor", step=100}', "would never come"),
    ],
)
def test_a_fault_that_cannot_come_is_refused(event, message):
    with pytest.raises(ConfigError, match=message):
        FaultPlan(config_with(events(event)))


def test_messages_cannot_be_lost_where_there_are_none():
    with pytest.raises(ConfigError, match="in one process there are none"):
        FaultPlan(config_with(events('{kind="lose_messages", target="actor"}'), "run.runtime=inprocess"))


def test_a_kind_that_does_not_exist_and_a_key_that_does_not_are_named():
    with pytest.raises(ConfigError, match=r"kind = 'kil'.*allowed are 'kill'"):
        config_with(events('{kind="kil", target="actor"}'))
    with pytest.raises(ConfigError, match=r"unknown key 'stp'.*known here: kind"):
        config_with(events('{kind="kill", target="actor", stp=1}'))


def test_a_disturbance_hits_as_often_as_it_says_and_no_more():
    disturbance = Disturbance(seed=1)
    disturbance.check_sync()
    disturbance.add(FaultEvent(kind="fail_sync", target="engine-0", count=2))
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="on purpose"):
            disturbance.check_sync()
    disturbance.check_sync()
    disturbance.add(FaultEvent(kind="lose_messages", target="actor", count=3, probability=0.3))
    lost = [disturbance.loses_message() for _ in range(200)]
    assert sum(lost) == 3
    assert lost[:3] != [True] * 3, "by chance, not at once"


async def test_calls_of_a_slowed_queue_take_longer_until_it_is_over():
    class Queue:
        async def stats(self) -> dict[str, int]:
            return {"rows": 1}

    disturbance = Disturbance()
    queue = slowed(Queue(), disturbance)
    loop = asyncio.get_running_loop()
    disturbance.add(FaultEvent(kind="delay", target="rollout", seconds=0.05))
    started = loop.time()
    assert await queue.stats() == {"rows": 1}
    first = loop.time() - started
    await queue.stats()
    assert first >= 0.05
    assert loop.time() - started - first < 0.05
