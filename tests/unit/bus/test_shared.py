"""What a group shares: once however many rows, to every task that asks, counted, saved, and freed with the last row."""

import gc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from unit.bus.parts import assert_same_arrays, make_shared

from relax.bus.client import connect
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.snapshot import restore
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, WaitTimeout
from relax.shared_arrays import lend, share

LIMITS = QueueLimits(prompts_per_step=2, max_staleness=1, num_steps=4)


@pytest.mark.parametrize("size", [1, 30_000])
async def test_what_a_group_shares_comes_once_to_whoever_asks(queue, ready, group, size):
    """To every task, whole, of any shape, also a scalar or nothing; unchangeable, and there after the acknowledgement."""
    await ready(queue)
    first, second, third = await queue.admit(3, 1.0)
    shared = {
        "pixel_values": np.random.default_rng(0).standard_normal((size, 3)).astype(np.float32),
        "seconds": np.array(1.5),
        "no_audio": np.zeros((0, 80), np.float16),
        "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
    }
    await queue.put_group(first.issue, group(0, num_rows=3), 1.0, shared)
    await queue.put_group(second.issue, group(0), 1.0)
    await queue.put_group(third.issue, group(0), 1.0, {"pixel_values": np.ones(2, np.uint8)})
    shared["pixel_values"][:] = 0
    shared["pixel_values"] = np.random.default_rng(0).standard_normal((size, 3)).astype(np.float32)
    for task in ("reference", "actor"):
        lease = await queue.claim(task, ("tokens",), num_groups=3, wait_s=1.0, shared=True)
        assert sorted(set(lease.group_ids)) == [first.issue, second.issue, third.issue]
        assert lease.shared.keys() == {first.issue, third.issue}
        assert_same_arrays(lease.shared[first.issue], shared)
        assert lease.shared[third.issue]["pixel_values"].tolist() == [1, 1]
        with pytest.raises(ValueError, match="read-only"):
            lease.shared[first.issue]["pixel_values"][0] = 1
        assert all(array.flags.aligned for arrays in lease.shared.values() for array in arrays.values())
    await queue.ack([lease.lease_id])
    assert (await queue.stats())["bytes"]["shared"] == 0
    assert_same_arrays(lease.shared[first.issue], shared)


async def test_who_does_not_ask_gets_nothing_shared(queue, ready, group):
    await ready(queue)
    (ticket,) = await queue.admit(1, 1.0)
    await queue.put_group(ticket.issue, group(0), 1.0, {"pixel_values": np.zeros(3)})
    assert (await queue.claim("advantages", ("tokens",), num_groups=1, wait_s=1.0)).shared == {}


@pytest.mark.parametrize("wrong", [[1, 2], np.array(["text"])])
async def test_what_cannot_be_shared_is_refused_by_name(queue, ready, group, wrong):
    """And the ticket can still be used."""
    await ready(queue)
    (ticket,) = await queue.admit(1, 1.0)
    with pytest.raises(BusError, match=rf"group {ticket.issue}: .*'pixel_values'"):
        await queue.put_group(ticket.issue, group(0), 1.0, {"pixel_values": wrong})
    assert await queue.put_group(ticket.issue, group(0), 1.0)


async def test_shared_arrays_count_once_however_many_rows(ready, group):
    """They take room, hold a producer back, and give the room up with the last row."""
    core = await ready(Core(QueueLimits(2, 3, 9, max_bytes=5000)))
    first, second, third = await core.admit(3, 0.0)
    image = {"pixel_values": np.zeros((4, 512), np.uint8)}
    with pytest.raises(WaitTimeout):
        await core.claim("actor", ("tokens",), num_groups=2, wait_s=0.0, step=0)
    await core.put_group(first.issue, group(num_rows=8), 0.0, image)
    before = (await core.stats())["bytes"]
    assert before["shared"] == 2048
    assert 2048 < before["held"] < 3000
    await core.put_group(second.issue, group(), 0.0, {"pixel_values": np.zeros(1800, np.uint8)})
    with pytest.raises(WaitTimeout, match="room for"):
        await core.put_group(third.issue, group(), 0.0, image)
    *rest, last = core.rows.groups[first.issue].row_ids
    await core.drop(rest, "poison")
    assert (await core.stats())["bytes"]["shared"] == 2048 + 1800
    with pytest.raises(WaitTimeout, match="room for"):
        await core.put_group(third.issue, group(), 0.0, image)
    await core.drop([last], "poison")
    assert (await core.stats())["bytes"]["shared"] == 1800
    await core.put_group(third.issue, group(), 0.0, image)
    with pytest.raises(BusError, match=r"services\.queue_max_bytes"):
        await core.put_group((await core.admit(1, 0.0))[0].issue, group(), 0.0, {"x": np.zeros(5000, np.uint8)})


async def test_what_groups_share_survives_and_is_freed_by_itself(tmp_path, ready, group):
    core = await ready(Core(LIMITS))
    tickets = await core.admit(3, 0.0)
    for ticket in tickets[:2]:
        await core.put_group(ticket.issue, group(0), 0.0, make_shared(ticket.issue))
    await core.put_group(tickets[2].issue, group(0), 0.0)
    await core.snapshot(str(tmp_path / "queue"))
    again = await ready(restore(tmp_path / "queue", LIMITS))
    assert (await again.stats())["bytes"] == (await core.stats())["bytes"]
    lease = await again.claim("actor", ("tokens",), num_groups=3, wait_s=0.0, shared=True)
    assert lease.shared.keys() == {ticket.issue for ticket in tickets[:2]}
    for issue, arrays in lease.shared.items():
        assert_same_arrays(arrays, make_shared(issue))
        assert all(array.flags.aligned and array.base.nbytes == array.nbytes for array in arrays.values())
    await again.drop(again.rows.groups[0].row_ids, "poison")
    await again.ack([lease.lease_id])
    assert (await again.stats())["bytes"]["held"] == 0


async def test_a_snapshot_from_before_groups_shared_anything_is_read(tmp_path, ready, group):
    core = await ready(Core(LIMITS))
    (ticket,) = await core.admit(1, 0.0)
    await core.put_group(ticket.issue, group(0), 0.0)
    path = tmp_path / "queue"
    await core.snapshot(str(path))
    content = path.read_bytes()
    start = 16 + int.from_bytes(content[8:16], "little")
    state = msgspec.msgpack.decode(content[16:start])
    state["format"] = 2
    for saved in state["groups"]:
        assert saved.pop("shared") == {}
    header = msgspec.msgpack.encode(state)
    path.write_bytes(content[:8] + len(header).to_bytes(8, "little") + header + content[start:])
    again = restore(path, LIMITS)
    assert again.rows.groups.keys() == core.rows.groups.keys()
    assert again.rows.num_bytes == core.rows.num_bytes


async def test_shared_arrays_are_copied_once_on_each_side(ready, group):
    """Into the arena and out of it: what the core holds lies in the arena, and no message carries it."""
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await connect(server.address)
        (ticket,) = await bus.admit(1, 1.0)
        image = np.random.default_rng(0).random((1024, 1176), np.float32)
        await bus.put_group(ticket.issue, group(0, num_rows=8), 1.0, {"pixel_values": image})
        held = server.core.rows.groups[ticket.issue].shared["pixel_values"]
        assert server._arena.locate(held) is not None
        answers = []
        bus._call = lambda *arguments, call=bus._call, **more: _kept(call(*arguments, **more), answers)
        for task in ("reference", "actor"):
            lease = await bus.claim(task, ("tokens",), num_groups=1, wait_s=1.0, shared=True)
            np.testing.assert_array_equal(lease.shared[ticket.issue]["pixel_values"], image, strict=True)
            assert len(answers.pop()[1]) < 1024
        await bus.ack([lease.lease_id])
        del held
        await bus.close()
        assert server._arena.num_free_bytes == server._arena.num_bytes


async def test_a_restored_queue_lends_shared_arrays_as_well(tmp_path, ready, group):
    core = await ready(Core(LIMITS))
    (ticket,) = await core.admit(1, 0.0)
    shared = {
        "pixel_values": np.random.default_rng(0).random((1024, 1176), np.float32),
        "none": np.zeros((0, 3)),
        "image_grid_thw": np.array([[1, 2, 3]]),
    }
    await core.put_group(ticket.issue, group(0), 0.0, shared)
    await core.snapshot(str(tmp_path / "queue"))
    async with BusServer(restore(tmp_path / "queue", LIMITS)) as server:
        bus = await connect(server.address)
        answers = []
        bus._call = lambda *arguments, call=bus._call, **more: _kept(call(*arguments, **more), answers)
        lease = await bus.claim("actor", ("tokens",), num_groups=1, wait_s=1.0, shared=True)
        assert_same_arrays(lease.shared[ticket.issue], shared)
        assert len(answers.pop()[1]) < 1024
        await bus.ack([lease.lease_id])
        await bus.close()
        assert server._arena.num_free_bytes == server._arena.num_bytes


async def test_arrays_in_shared_memory_stay_where_they_lie(ready, group):
    """From the producer to every consumer without a copy, and freed with the last row and the last reader."""
    num_open = _num_open_files()
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await connect(server.address)
        (ticket,) = await bus.admit(1, 1.0)
        image = np.random.default_rng(0).random((64, 1176), np.float32)
        shared = share({"pixel_values": image, "image_grid_thw": np.array([[1, 8, 8]])})
        inode = lend(shared["pixel_values"]).inode
        await bus.put_group(ticket.issue, group(0, num_rows=8), 1.0, shared)
        del shared
        assert (await bus.stats())["bytes"]["shared"] == image.nbytes + 24
        for task in ("reference", "actor"):
            lease = await bus.claim(task, ("tokens",), num_groups=1, wait_s=1.0, shared=True)
            found = lease.shared[ticket.issue]
            assert lend(found["pixel_values"]).inode == inode
            assert found["image_grid_thw"].tolist() == [[1, 8, 8]]
        await bus.ack([lease.lease_id])
        np.testing.assert_array_equal(found["pixel_values"], image, strict=True)
        assert server._arena.num_bytes == 0, "nothing was copied into the queue's own memory"
        del lease, found
        await bus.close()
    assert _num_open_files() <= num_open


@pytest.mark.parametrize("length", [3, 8000])
async def test_arrays_in_shared_memory_hold_a_producer_back(ready, group, length):
    """They count as if they were in the queue's own memory, beside columns that are and columns that travel in the message."""
    async with BusServer(Core(QueueLimits(1, 1, 4, max_bytes=200_000))) as server:
        await ready(server.core)
        bus = await connect(server.address)
        first, second = await bus.admit(2, 1.0)
        image = share({"pixel_values": np.zeros(150_000, np.uint8)})
        with pytest.raises(WaitTimeout):
            await bus.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0)  # the first is what this step needs
        await bus.put_group(first.issue, group(0), 1.0, image)
        with pytest.raises(WaitTimeout, match="room for"):
            await bus.put_group(second.issue, group(0, num_rows=1, length=length), 0.0, image)
        await bus.close()


async def test_a_claim_whose_groups_were_dropped_on_the_way_is_made_again(ready, group):
    """The trainer goes back while the answer to another role's claim is under way: what it names is gone."""
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await connect(server.address)
        (ticket,) = await bus.admit(1, 1.0)
        await bus.put_group(ticket.issue, group(0), 1.0, share({"pixel_values": np.zeros(1 << 15)}))

        async def late(*arguments, call=bus._call, **more):
            answer = await call(*arguments, **more)
            await server.core.rewind(0)
            gc.collect()
            return answer

        bus._call = late
        with pytest.raises(WaitTimeout, match="still there"):
            await bus.claim("reference", ("tokens",), num_groups=1, wait_s=1.0, shared=True)
        await bus.close()


async def test_what_the_queue_cannot_map_is_no_void_ticket(monkeypatch, ready, group):
    """A producer whose arrays the queue does not find, as in another container, would else go on without a word."""
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await connect(server.address)
        (ticket,) = await bus.admit(1, 1.0)
        elsewhere = lend(share({"pixel_values": np.zeros(1 << 15)})["pixel_values"])  # is let go at once
        monkeypatch.setattr("relax.bus.packing.lend", lambda _: elsewhere)
        with pytest.raises(BusError, match=f"group {ticket.issue}: .*pixel_values") as caught:
            await bus.put_group(ticket.issue, group(0), 1.0, {"pixel_values": np.zeros(1 << 15)})
        assert type(caught.value) is BusError
        await bus.close()


async def _kept(call, answers: list):
    answers.append(await call)
    return answers[-1]


def _num_open_files() -> int:
    gc.collect()
    return len([*Path("/proc/self/fd").iterdir()])
