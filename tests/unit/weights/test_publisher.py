"""Buffers are re-used only when nobody needs them, and the trainer never waits for one."""

import asyncio
import os
import threading

import pytest
import torch

from relax.errors import BusError, WaitTimeout
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
    monkeypatch.setattr("relax.weights.publisher.content_digest", lambda *_: str(turned.wait(5)))
    snapshot = publisher.snapshot(1, {"w": torch.ones(3)}, CANARY)
    task = asyncio.create_task(publisher.publish(snapshot))
    await asyncio.sleep(0)
    turned.set()
    await task
    assert bus.versions.newest.digest == "True"
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
