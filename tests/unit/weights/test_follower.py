"""A receiver ends up at the newest version that verifies, says why when it does not, and leaves no subscription behind."""

import asyncio

import pytest
import torch

from relax.errors import BusGone, WeightSyncError
from relax.weights import follower
from relax.weights.follower import follow
from relax.weights.publisher import WeightPublisher
from relax.weights.receiver import read_weights

CANARY = ((1, 2), (-0.5,))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(follower, "_FIRST_PAUSE_S", 0.001)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


async def stopped(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
async def publisher(bus, roots):
    made = WeightPublisher(bus, "run")
    yield made
    await made.close()


async def publish(publisher, version):
    await publisher.publish(publisher.snapshot(version, {"w": torch.full((4,), float(version))}, CANARY))


async def test_versions_are_loaded_acknowledged_and_reported(bus, publisher):
    loaded = []

    async def load(manifest):
        loaded.append(read_weights(manifest)["w"][0].item())
        return 0.25

    task = asyncio.create_task(follow(bus, "engine", load))
    for version in (1, 2):
        await publish(publisher, version)
        await bus.wait_acknowledged(version, 5)
    events = [event for event in await bus.events(0, 0) if event["kind"] == "weights"]
    assert loaded == [1, 2]
    assert [(event["version"], event["canary_diff"]) for event in events] == [(1, 0.25), (2, 0.25)]
    assert all(event["load_s"] >= 0 for event in events)
    await stopped(task)
    assert bus.versions.held == {}


async def test_a_late_receiver_takes_only_the_newest(bus, publisher):
    loaded = []

    async def load(manifest):
        loaded.append(manifest.version)
        return 0.0

    await publish(publisher, 1)
    await publish(publisher, 2)
    task = asyncio.create_task(follow(bus, "engine", load))
    await bus.wait_acknowledged(2, 5)
    assert loaded == [2]
    await stopped(task)


async def test_a_version_that_does_not_verify_is_rejected_with_the_reason_and_tried_again(bus, publisher):
    attempts = []

    async def load(manifest):
        attempts.append(manifest.version)
        if len(attempts) < 3:
            raise WeightSyncError("digest disagrees")
        return 0.0

    task = asyncio.create_task(follow(bus, "engine", load, max_failures=3))
    await publish(publisher, 1)
    await until(lambda: bus.versions.num_rejected)
    assert "engine holds no version and rejected version 1: digest disagrees" in bus.versions.waiting_for(1)
    await bus.wait_acknowledged(1, 5)
    assert attempts == [1, 1, 1]
    assert bus.versions.num_rejected == 2
    rejected = [event["failures"] for event in await bus.events(0, 0) if event.get("rejected") == "digest disagrees"]
    assert rejected == [1, 2]
    await stopped(task)


async def test_too_many_failures_in_a_row_are_raised(bus, publisher):
    async def load(manifest):
        raise WeightSyncError(f"bad {manifest.version}")

    await publish(publisher, 2)
    with pytest.raises(WeightSyncError, match="engine: 4 failures in a row to take weights; the last: bad 2"):
        await follow(bus, "engine", load, max_failures=4)
    assert bus.versions.held == {}
    assert bus.versions.num_rejected == 4


async def test_success_sets_the_count_of_failures_back(bus, publisher):
    attempts = []

    async def load(manifest):
        attempts.append(manifest.version)
        if attempts.count(manifest.version) < 3:
            raise WeightSyncError("bad at first")
        return 0.0

    task = asyncio.create_task(follow(bus, "engine", load, max_failures=3))
    for version in (1, 2):
        await publish(publisher, version)
        await bus.wait_acknowledged(version, 5)
    assert attempts == [1, 1, 1, 2, 2, 2]
    await stopped(task)


async def test_a_newer_version_takes_the_place_of_a_bad_one(bus, publisher):
    async def load(manifest):
        if manifest.version == 1:
            raise WeightSyncError("bad")
        return 0.0

    task = asyncio.create_task(follow(bus, "engine", load, max_failures=1000))
    await publish(publisher, 1)
    await until(lambda: bus.versions.num_rejected)
    await publish(publisher, 2)
    await bus.wait_acknowledged(2, 5)
    await stopped(task)


async def test_other_errors_are_not_taken_for_bad_weights(bus, publisher):
    async def load(manifest):
        raise ZeroDivisionError

    task = asyncio.create_task(follow(bus, "engine", load))
    await publish(publisher, 1)
    with pytest.raises(ZeroDivisionError):
        await task
    assert bus.versions.num_rejected == 0
    assert bus.versions.held == {}


async def test_it_ends_when_the_queue_does(bus, publisher):
    async def load(manifest):
        return 0.0

    task = asyncio.create_task(follow(bus, "engine", load))
    await until(lambda: bus.versions.held)
    await bus.close()
    with pytest.raises(BusGone):
        await task


async def test_a_publisher_that_died_is_a_reason_to_reject(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await publish(publisher, 1)
    await publisher.close()

    async def load(manifest):
        read_weights(manifest)
        return 0.0

    with pytest.raises(WeightSyncError, match="the publisher ended"):
        await follow(bus, "engine", load, max_failures=2)


# -- turns, rewinds, and versions that are left out -----------------------------------------------------------------------
async def weights_events(bus):
    return [event for event in await bus.events(0, 0) if event["kind"] == "weights"]


async def test_recalled_weights_are_given_up_before_it_is_said_and_the_next_version_is_taken(bus, publisher):
    done = []

    async def load(manifest):
        done.append(manifest.version)
        return 0.0

    async def give_up():
        done.append("letting go")
        await asyncio.sleep(0.01)
        assert bus.versions.held["engine"] is not None, "not before it is done"
        done.append("gave up")

    task = asyncio.create_task(follow(bus, "engine", load, give_up=give_up))
    for version in (1, 2):
        await publish(publisher, version)
        await bus.wait_acknowledged(version, 5)
        await bus.recall(5)
        assert bus.versions.held["engine"] is None
    await publish(publisher, 3)
    await bus.wait_acknowledged(3, 5)
    assert done == [1, "letting go", "gave up", 2, "letting go", "gave up", 3]
    await stopped(task)


async def test_a_failure_to_give_up_is_raised(bus, publisher):
    async def load(manifest):
        return 0.0

    async def give_up():
        raise ZeroDivisionError

    task = asyncio.create_task(follow(bus, "engine", load, give_up=give_up))
    await publish(publisher, 1)
    await bus.wait_acknowledged(1, 5)
    await bus.recall(5)  # a receiver that ended has none
    with pytest.raises(ZeroDivisionError):
        await task
    assert bus.versions.held == {}


async def test_after_the_trainer_went_back_a_lower_version_is_taken(bus, publisher):
    loaded = []

    async def load(manifest):
        loaded.append(manifest.version)
        return 0.0

    task = asyncio.create_task(follow(bus, "engine", load))
    await publish(publisher, 4)
    await bus.wait_acknowledged(4, 5)
    await bus.rewind(0)
    for version in (2, 3):
        await publish(publisher, version)
        await bus.wait_acknowledged(version, 5)
    assert loaded == [4, 2, 3]
    await stopped(task)


async def test_a_version_that_was_called_back_while_it_was_loaded_is_replaced_by_the_next(bus, publisher):
    loaded, go_on = [], asyncio.Event()

    async def load(manifest):
        loaded.append(manifest.version)
        await go_on.wait()
        return 0.0

    task = asyncio.create_task(follow(bus, "engine", load))
    await publish(publisher, 4)
    await until(lambda: loaded)
    await bus.rewind(0)
    go_on.set()
    await asyncio.sleep(0.01)
    assert bus.versions.held["engine"] is None, "it does not hold what the trainer no longer knows"
    await publish(publisher, 2)
    await bus.wait_acknowledged(2, 5)
    assert loaded == [4, 2]
    await stopped(task)


async def test_identical_weights_are_said_to_be(bus, publisher):
    async def load(manifest):
        return 0.0

    task = asyncio.create_task(follow(bus, "engine", load))
    for version, value in ((1, 1.0), (2, 1.0), (3, 2.0)):
        await publisher.publish(publisher.snapshot(version, {"w": torch.full((4,), value)}, CANARY))
        await bus.wait_acknowledged(version, 5)
    assert [event.get("identical", False) for event in await weights_events(bus)] == [False, True, False]
    await stopped(task)
