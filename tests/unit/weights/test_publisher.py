"""Buffers are re-used only when nobody needs them, and the trainer never waits for one."""

import asyncio
import hashlib
import os
import threading

import pytest
import torch

from relax.errors import BusError, BusGone, WaitTimeout, WeightSyncError
from relax.weights import publisher as publisher_module
from relax.weights.publisher import WeightPublisher
from relax.weights.receiver import read_weights

CANARY = ((1, 2), (-0.5,))


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)


async def publish(publisher, version, size=1000):
    snapshot = publisher.snapshot(version, {"w": torch.full((size,), float(version))}, CANARY)
    await publisher.publish(snapshot)
    return snapshot


async def acknowledge(bus, publisher, version, subscriber="engine"):
    await bus.acknowledge(subscriber, version)
    await until(lambda: not publisher._unsettled or bus.versions.floor < publisher._unsettled[0])


async def test_two_buffers_serve_any_number_of_acknowledged_versions(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await bus.subscribe("engine")
    locations = set()
    for version in range(1, 12):
        locations.add((await publish(publisher, version)).file.path)
        assert read_weights(bus.versions.newest)["w"].unique().tolist() == [version]
        await acknowledge(bus, publisher, version - 1 if version > 1 else version)
    assert len(locations) == 2
    await publisher.close()
    assert list(roots[0][1].iterdir()) == []


async def test_a_version_that_is_not_acknowledged_is_not_written_over(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await bus.subscribe("fast")
    await bus.subscribe("slow")
    await publish(publisher, 1)
    first = bus.versions.newest
    await bus.acknowledge("fast", 1)
    await publish(publisher, 2)
    second = bus.versions.newest
    await bus.acknowledge("fast", 2)
    await publish(publisher, 3)
    assert read_weights(first)["w"].unique().tolist() == [1]
    assert read_weights(second)["w"].unique().tolist() == [2]
    assert len(publisher._pool) == 3
    await bus.acknowledge("slow", 3)
    await bus.acknowledge("fast", 3)
    await until(lambda: not publisher._unsettled)
    await publish(publisher, 4)
    assert len(publisher._pool) == 3
    await publisher.close()


async def test_a_slow_reader_keeps_its_tensors_however_far_training_runs_ahead(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await bus.subscribe("engine")
    await publish(publisher, 1)
    held = read_weights(bus.versions.newest)["w"]
    for version in range(2, 9):
        await publish(publisher, version)
    assert held.unique().tolist() == [1]
    assert read_weights(bus.versions.newest)["w"].unique().tolist() == [8]
    assert len(publisher._pool) <= 4, "overtaken versions that nobody has mapped give way"
    await publisher.close()


async def test_acknowledged_but_still_mapped_is_not_written_over(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await bus.subscribe("engine")
    await publish(publisher, 1)
    held = read_weights(bus.versions.newest)["w"]
    for version in range(1, 5):
        await acknowledge(bus, publisher, version)
        await publish(publisher, version + 1)
    assert held.unique().tolist() == [1]
    await publisher.close()


async def test_a_model_that_changes_its_size_fits_every_time(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await bus.subscribe("engine")
    for version, size in enumerate((10, 5000, 3, 70_000, 1), 1):
        await publish(publisher, version, size)
        assert len(read_weights(bus.versions.newest)["w"]) == size
        await acknowledge(bus, publisher, version)
    await publisher.close()


async def test_the_same_version_can_be_published_again_after_a_restart(bus, roots):
    first = WeightPublisher(bus, "run")
    await publish(first, 3)
    digest = bus.versions.newest.digest
    os.truncate(bus.versions.newest.location, 0)  # as if the publisher's host had lost it
    second = WeightPublisher(bus, "run")
    await publish(second, 4)
    assert bus.versions.newest.digest != digest
    assert read_weights(bus.versions.newest)["w"].unique().tolist() == [4]
    await first.close()
    await second.close()


async def test_publish_says_so_when_the_queue_is_gone_and_close_still_cleans_up(bus, roots):
    publisher = WeightPublisher(bus, "run")
    snapshot = publisher.snapshot(1, {"w": torch.ones(3)}, CANARY)
    await bus.close()
    with pytest.raises(BusError):
        await publisher.publish(snapshot)
    await publisher.close()
    assert list(roots[0][1].iterdir()) == []


async def test_the_event_loop_turns_while_the_digest_is_computed(bus, roots, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    turned = threading.Event()
    monkeypatch.setattr("relax.weights.digest._digest", lambda chunk: str(turned.wait(5)).encode())
    snapshot = publisher.snapshot(1, {"w": torch.ones(3)}, CANARY)
    task = asyncio.create_task(publisher.publish(snapshot))
    await asyncio.sleep(0)
    turned.set()
    await task
    assert bus.versions.newest.buckets[0][2] == f"sha256:{hashlib.sha256(b'True').hexdigest()}"
    await publisher.close()


async def test_a_publication_is_reported_with_its_cost(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await publish(publisher, 1)
    (event,) = await bus.events(0, 0)
    assert event["kind"] == "publication"
    assert event["version"] == 1
    assert event["publish/bytes"] == 4032
    assert event["publish/snapshot_s"] > 0
    assert event["publish/digest_s"] > 0
    await publisher.close()


async def test_waiting_for_acknowledgement_ends_with_a_reason(bus, roots):
    publisher = WeightPublisher(bus, "run")
    await bus.subscribe("engine")
    await publish(publisher, 1)
    with pytest.raises(WaitTimeout, match="engine holds no version"):
        await bus.wait_acknowledged(1, 0.01)
    await publisher.close()


# -- failures -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def pauses(monkeypatch):
    """Short ones."""
    monkeypatch.setattr(publisher_module, "_FIRST_PAUSE_S", 0.001)


def publications(events):
    return [event for event in events if event["kind"] == "publication"]


class Failures:
    """Raises `error` at the first `count` calls of a method."""

    def __init__(self, monkeypatch, owner, name, count, error):
        self.left, plain = count, getattr(owner, name)

        def call(*arguments, **options):
            if self.left:
                self.left -= 1
                raise error
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, call)


def read(version):
    return lambda: {"w": torch.full((1000,), float(version))}, lambda: CANARY


async def test_no_room_at_first_is_tried_again_and_counted(bus, roots, pauses, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    Failures(monkeypatch, os, "posix_fallocate", 4, OSError(28, "No space left on device"))  # two places, two attempts
    snapshot = await publisher.snapshot_with_retries(1, *read(1))
    assert bus.versions.newest is None
    assert await publisher.publish_with_retries(snapshot)
    events = await bus.events(0, 0)
    assert [event["publish/failed"] for event in publications(events)] == [2]
    failed = [event for event in events if event["kind"] == "publication_failed"]
    assert [event["failures"] for event in failed] == [1, 2]
    assert "No space left" in failed[0]["error"]
    await publish(publisher, 2)
    assert publications(await bus.events(0, 0))[-1]["publish/failed"] == 0
    await publisher.close()


async def test_no_room_for_good_ends_with_the_reason_and_no_version(bus, roots, pauses, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    Failures(monkeypatch, os, "posix_fallocate", 100, OSError(28, "No space left on device"))
    with pytest.raises(WeightSyncError, match=r"version 1 could not be published in 3 attempts: no room for.*--shm-size"):
        await publisher.snapshot_with_retries(1, *read(1), max_attempts=3)
    assert bus.versions.newest is None
    await publisher.close()
    assert [*roots[0][1].iterdir(), *roots[1][1].iterdir()] == []


async def test_a_disk_that_fails_while_the_weights_are_copied_costs_no_buffer(bus, roots, pauses, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    Failures(monkeypatch, publisher, "_copy", 2, OSError(5, "Input/output error"))
    snapshot = await publisher.snapshot_with_retries(1, *read(1))
    assert await publisher.publish(snapshot)
    assert read_weights(bus.versions.newest)["w"].unique().tolist() == [1]
    assert len(publisher._pool) == 1
    await publisher.close()


async def test_diverged_training_is_not_tried_again(bus, roots, pauses):
    publisher = WeightPublisher(bus, "run")
    calls = []

    def canary():
        calls.append(1)
        return (1, 2), (float("nan"),)

    with pytest.raises(WeightSyncError, match="diverged"):
        await publisher.snapshot_with_retries(1, read(1)[0], canary)
    assert len(calls) == 1
    await publisher.close()


async def test_a_queue_that_does_not_answer_is_asked_again(bus, roots, pauses, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    Failures(monkeypatch, bus, "announce", 2, WaitTimeout("announce", "the core", 1.0))
    snapshot = publisher.snapshot(1, *(make() for make in read(1)))
    assert await publisher.publish_with_retries(snapshot)
    assert bus.versions.newest.version == 1
    assert publications(await bus.events(0, 0))[0]["publish/failed"] == 2
    await publisher.close()


async def test_a_publication_that_fails_for_good_advances_nothing_and_frees_its_buffer(bus, roots, pauses, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    await publish(publisher, 1)
    Failures(monkeypatch, bus, "announce", 3, WaitTimeout("announce", "the core", 1.0))
    with pytest.raises(WeightSyncError, match="version 2 could not be published in 3 attempts: announce: still waiting"):
        await publisher.publish_with_retries(publisher.snapshot(2, *(make() for make in read(2))), max_attempts=3)
    assert bus.versions.newest.version == 1
    await publish(publisher, 3)
    assert len(publisher._pool) == 2
    await publisher.close()


async def test_a_lost_queue_is_not_waited_for(bus, roots, pauses):
    publisher = WeightPublisher(bus, "run")
    snapshot = publisher.snapshot(1, *(make() for make in read(1)))
    await bus.close()
    with pytest.raises(BusGone):
        await publisher.publish_with_retries(snapshot)
    await publisher.close()


async def test_a_version_that_was_overtaken_is_skipped_and_counted(bus, roots, pauses, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    first, second, third = (publisher.snapshot(v, *(make() for make in read(v))) for v in (1, 2, 3))
    announced = await asyncio.gather(*(publisher.publish_with_retries(s) for s in (first, second, third)))
    assert announced == [False, False, True]
    [event] = publications(await bus.events(0, 0))
    assert (event["version"], event["publish/skipped"]) == (3, 2)
    assert read_weights(bus.versions.newest)["w"].unique().tolist() == [3]
    await publish(publisher, 4)
    await publish(publisher, 5)
    assert len(publisher._pool) == 3, "the buffers of skipped versions are used again"
    await publisher.close()


async def test_a_version_that_is_travelling_is_announced_although_a_newer_one_is_there(bus, roots):
    """Else a trainer that is quicker than the hashing would never publish anything."""
    publisher = WeightPublisher(bus, "run")
    travelling = asyncio.create_task(publisher.publish(publisher.snapshot(1, *(make() for make in read(1)))))
    await asyncio.sleep(0)
    second = publisher.snapshot(2, *(make() for make in read(2)))
    assert await travelling
    assert await publisher.publish(second)
    await publisher.close()


async def test_a_failed_publication_gives_way_to_the_next_one(bus, roots, monkeypatch):
    monkeypatch.setattr(publisher_module, "_FIRST_PAUSE_S", 0.05)
    publisher = WeightPublisher(bus, "run")
    Failures(monkeypatch, bus, "announce", 1, WaitTimeout("announce", "the core", 1.0))
    first = asyncio.create_task(publisher.publish_with_retries(publisher.snapshot(1, *(make() for make in read(1)))))
    await until(lambda: publisher._num_failed)
    assert await publisher.publish_with_retries(publisher.snapshot(2, *(make() for make in read(2))))
    assert await first is False
    assert bus.versions.num_announced == 1
    await publisher.close()


async def test_a_lost_event_does_not_undo_a_publication(bus, roots, pauses, monkeypatch):
    publisher = WeightPublisher(bus, "run")
    Failures(monkeypatch, bus, "emit", 1, WaitTimeout("emit", "the core", 1.0))
    assert await publisher.publish_with_retries(publisher.snapshot(1, *(make() for make in read(1))))
    assert bus.versions.num_announced == 1
    await publisher.close()
