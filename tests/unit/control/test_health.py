"""Budgets and pauses on a clock that the test moves, and what a status says is wrong."""

import pytest

from relax.config.services import ServicesConfig
from relax.control.health import Failure, Health, find_failures


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_the_first_restart_is_at_once_and_the_pause_doubles_up_to_half_a_minute(clock):
    health = Health(ServicesConfig(max_restarts=9, restart_backoff_s=1.0), clock)
    assert [health.failed("actor", "x") for _ in range(9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert health.failed("actor", "x") is None
    assert health.state("actor") == "failed"


def test_budgets_are_by_name_and_the_first_error_is_kept(clock):
    health = Health(ServicesConfig(max_restarts=2), clock)
    assert health.failed("actor", "the first") == 0.0
    assert health.state("actor") == "restarting"
    health.restarted("actor")
    assert health.state("actor") == "ok"
    assert health.failed("actor", "the second") is not None
    assert health.failed("engine-0", "another") == 0.0
    assert health.failed("actor", "the third") is None
    assert health.first_error("actor") == "the first"
    assert (health.num_failures, health.num_restarts) == (4, 1)


def test_a_budget_is_whole_again_after_a_time_without_a_failure(clock):
    health = Health(ServicesConfig(max_restarts=1, restart_memory_s=10.0), clock)
    assert health.failed("rollout", "old") == 0.0
    clock.time = 10.5
    assert health.failed("rollout", "new") == 0.0
    assert health.first_error("rollout") == "new"
    clock.time = 20.0
    assert health.failed("rollout", "newer") is None, "within the memory of the last one"


def test_no_restarts_at_all_can_be_asked_for(clock):
    assert Health(ServicesConfig(max_restarts=0), clock).failed("actor", "x") is None


def test_statuses_name_what_is_wrong_and_what_all_need_comes_first():
    statuses = {
        "rollout": {"activity": "generating", "error": None},
        "engine-0": {"error": "boom", "error_kind": "crash"},
        "advantages": {"error": None, "silent_s": 61.0},
        "actor": {"activity": "not started", "error": None},
        "reference": {"error": None, "silent_s": 3.0},
        "queue": {"error": "gone", "error_kind": "queue"},
    }
    found = find_failures(statuses, 60.0)
    assert found[0] == Failure("queue", "gone", "queue")
    assert found[0].is_of_runtime
    assert {failure.name: failure.kind for failure in found[1:]} == {
        "engine-0": "crash", "advantages": "silent", "actor": "dead",
    }  # fmt: skip
    assert "services.answer_timeout_s = 60" in next(f.cause for f in found if f.name == "advantages")
