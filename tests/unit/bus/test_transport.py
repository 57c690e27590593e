"""Clients and server as real processes, sockets and shared memory: deaths, restarts, addresses, leftovers."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from relax.bus.address import new_address, socket_path
from relax.bus.arena import Arena, remove_leftovers
from relax.bus.client import connect
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, BusGone, StaleHandle, WaitTimeout

LIMITS = QueueLimits(prompts_per_step=4, max_staleness=1, num_steps=3)

CLIENT = """
import asyncio, sys
from relax.bus.client import connect
async def main():
    bus = await connect(sys.argv[1], name="victim")
    await bus.subscribe("victim-engine")
    lease = await bus.claim("actor", ("tokens",), num_groups=2, wait_s=5.0)
    tickets = await bus.admit(1, 5.0) if len(sys.argv) > 2 else []
    print(*sorted(set(lease.group_ids)), flush=True)
    await bus.claim("actor", ("absent",), num_groups=2, wait_s=600.0)
asyncio.run(main())
"""

SERVER = """
import asyncio, sys
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits
async def main():
    server = BusServer(Core(QueueLimits(4, 1, 3)), sys.argv[1])
    await server.start()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def process(code: str, *arguments: str):
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, stdout=subprocess.PIPE)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def test_what_a_killed_client_held_comes_back(ready, group):
    """Its leases and its subscription return within a few seconds, and its waiting call with them."""
    async with BusServer(Core(LIMITS)) as server:
        bus = await connect(server.address, name="survivor")
        await ready(bus)
        tickets = await bus.admit(8, 1.0)
        for ticket in tickets[:3]:
            await bus.put_group(ticket.issue, group(0), 1.0)
        await bus.forfeit(tickets[7].issue, "failed", "so that a place is free")
        async with process(CLIENT, server.address) as victim:
            taken = [int(issue) for issue in (await victim.stdout.readline()).split()]
            assert taken == [0, 1]
            assert (await bus.stats())["versions"]["acknowledged"] == {"engine": 0, "victim-engine": None}
            victim.send_signal(signal.SIGKILL)
            got = await bus.claim("actor", ("tokens",), num_groups=9, wait_s=1.0)
            assert sorted(set(got.group_ids)) == [2]
            again = await bus.claim("actor", ("tokens",), num_groups=9, wait_s=10.0)  # wakes when the death is noticed
            assert sorted(set(again.group_ids)) == taken
        stats = await bus.stats()
        assert stats["versions"]["acknowledged"] == {"engine": 0}
        assert stats["waits"] == []
        events = await bus.events(0, 1.0)
        assert [(event["kind"], event["client"], event["leases"]) for event in events] == [("client_lost", "victim", 1)]
        await bus.close()


async def test_a_killed_server_is_noticed_by_calls_under_way_and_later_ones():
    """Within 10 s, with the reason; then a new server may use the same address, and old handles are refused."""
    address = new_address()
    async with process(SERVER, address) as victim:
        await victim.stdout.readline()
        bus = await connect(address)
        await bus.subscribe("engine")
        waiting = asyncio.create_task(bus.next_manifest("engine", 600.0))
        await asyncio.sleep(0.05)
        victim.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(BusGone, match=r"process \d+ died"):
            await waiting
        assert time.monotonic() - start < 10
        with pytest.raises(BusGone, match=r"process \d+ died"):
            await bus.stats()
        await bus.close()
    async with BusServer(Core(LIMITS), address):
        again = await connect(address)
        assert (await again.stats())["ledger"]["issued"] == 0
        await again.close()


async def test_a_server_that_stops_answering_is_gone_too(monkeypatch):
    """The process lives but its loop does not: seen by beats without an answer."""
    monkeypatch.setattr("relax.bus.calls.BEAT_S", 0.02)
    async with BusServer(Core(LIMITS)) as server:
        bus = await connect(server.address)
        server._receive = lambda frames: None
        server._channel._on_message = lambda frames: None
        with pytest.raises(BusGone, match="has said nothing for"):
            await bus.stats()
        await bus.close()


async def test_a_silent_client_is_taken_for_dead(monkeypatch, ready, group):
    async with BusServer(Core(LIMITS), client_silence_s=0.5) as server:
        await ready(server.core)
        (ticket,) = await server.core.admit(1, 1.0)
        await server.core.put_group(ticket.issue, group(0), 1.0)
        bus = await connect(server.address)
        lease = await bus.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)
        bus._calls._heart.cancel()
        again = await server.core.claim("actor", ("tokens",), num_groups=1, wait_s=10.0)
        assert again.row_ids == lease.row_ids
        with pytest.raises(BusGone, match="silent for too long"):
            await bus.ack([lease.lease_id])
        await bus.close()


async def test_a_client_that_was_taken_for_dead_learns_it_from_its_next_ping(monkeypatch):
    """Otherwise a call that was under way would wait for an answer that nobody gives."""
    monkeypatch.setattr("relax.bus.calls.BEAT_S", 0.02)
    async with BusServer(Core(LIMITS)) as server:
        bus = await connect(server.address)
        waiting = asyncio.create_task(bus.admit(1, 600.0))
        await asyncio.sleep(0.02)
        (session,) = server._sessions.values()
        server._forget(session)
        with pytest.raises(BusGone, match="taken for dead: connect again"):
            await asyncio.wait_for(waiting, 5.0)
        await bus.close()


async def test_tickets_of_a_client_that_leaves_are_given_again(ready):
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await connect(server.address)
        assert [ticket.issue for ticket in await bus.admit(3, 1.0)] == [0, 1, 2]
        await bus.forfeit(1, "filtered", "no signal")
        await bus.close()
        assert [ticket.issue for ticket in await server.core.admit(3, 1.0)] == [0, 2, 3]


async def test_closing_the_server_tells_its_clients():
    async with BusServer(Core(LIMITS)) as server:
        bus = await connect(server.address)
        waiting = asyncio.create_task(bus.events(0, 600.0))
        await asyncio.sleep(0.02)
    with pytest.raises(BusGone, match="closed"):
        await waiting
    with pytest.raises(BusGone, match="closed"):
        await bus.admit(1, 1.0)
    await bus.close()
    assert not socket_path(server.address).parent.exists()


async def test_an_answer_that_nobody_waits_for_is_undone(ready, group):
    """The lease was given, but its caller was cancelled before the answer was there: the rows are not lost."""
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        (ticket,) = await server.core.admit(1, 1.0)
        await server.core.put_group(ticket.issue, group(0), 1.0)
        bus = await connect(server.address)
        claiming = asyncio.create_task(bus.claim("actor", ("tokens",), num_groups=1, wait_s=5.0))
        admitting = asyncio.create_task(bus.admit(9, 5.0))
        await asyncio.sleep(0)  # both requests are on their way
        claiming.cancel()
        admitting.cancel()
        await asyncio.gather(claiming, admitting, return_exceptions=True)
        assert (await bus.claim("actor", ("tokens",), num_groups=1, wait_s=5.0)).group_ids == (0, 0)
        assert [t.issue for t in await bus.admit(9, 5.0)] == [1, 2, 3, 4, 5, 6, 7]
        await bus.close()


async def test_an_old_client_is_refused_by_a_new_life_of_the_queue():
    address = new_address()
    async with BusServer(Core(LIMITS), address):
        bus = await connect(address)
    revived = BusServer(Core(LIMITS), address)
    await revived.start()
    await asyncio.sleep(0.05)
    bus._calls.gone = None  # as if the notice of the end had been lost
    with pytest.raises(StaleHandle, match="restarted"):
        await bus.stats()
    await bus.close()
    await revived.close()


async def test_errors_arrive_as_what_they_are():
    async with BusServer(Core(LIMITS)) as server:
        bus = await connect(server.address)
        with pytest.raises(WaitTimeout) as caught:
            await bus.admit(1, 0.0)
        assert (caught.value.what, caught.value.reason) == ("admit", "the first receiver of weights to subscribe")
        with pytest.raises(BusError, match="only JSON values travel"):
            await bus.emit({"kind": "x", "value": object()})
        with pytest.raises(BusError, match="no operation 'destroy'"):
            await bus._call("destroy", {})
        with pytest.raises(BusError, match="TypeError"):
            await bus._call("admit", {"count": 1, "nonsense": 2})
        assert (await bus.stats())["ledger"]["issued"] == 0
        await bus.close()


async def test_bytes_that_are_no_message_change_nothing():
    """Noise on the socket, pickles included, is refused, and the queue goes on."""
    async with BusServer(Core(LIMITS)) as server:
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.connect(server.address)
        others = (
            [msgspec.msgpack.encode({"a": 1})],
            [msgspec.msgpack.encode([1, 2, 3])],
            [b"x", b"y", b"z"],
            [msgspec.msgpack.encode([1, 2, "hello", {}])],
        )
        for frames in ([b"\x80\x04N."], [b""], *others):
            raw.send_multipart(frames)
        bus = await connect(server.address)
        assert (await bus.stats())["ledger"]["issued"] == 0
        await bus.close()
        raw.close(0)


async def test_one_address_serves_one_queue():
    async with BusServer(Core(LIMITS)) as server:
        with pytest.raises(BusError, match="in use by another transfer queue"):
            await BusServer(Core(LIMITS), server.address).start()
        bus = await connect(server.address)
        await bus.stats()
        await bus.close()


async def test_nobody_else_can_connect():
    async with BusServer(Core(LIMITS)) as server:
        path = socket_path(server.address)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        server._arena.allocate(1)
        assert [stat.S_IMODE(os.stat(p).st_mode) for p in server._arena.paths] == [0o600]  # noqa: PTH116 - in an async test


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://0.0.0.0:5555", "ipc:///absolute/path only"),
        ("ipc://relative", "ipc:///absolute"),
        (f"ipc:///{'x' * 120}", "at most 100"),
    ],
)
async def test_other_addresses_are_refused(address, message):
    with pytest.raises(BusError, match=message):
        await BusServer(Core(LIMITS), address).start()
    with pytest.raises(BusError, match=message):
        await connect(address, wait_s=0.1)


async def test_an_address_without_a_queue_is_an_error():
    with pytest.raises(BusGone, match=r"no transfer queue answers at ipc://.* within 0\.1 s"):
        await connect(new_address(), wait_s=0.1)


# -- shared memory --------------------------------------------------------------------------------------------------------


async def test_memory_is_used_again_and_leaves_no_file(ready, group):
    """Ten times the memory of one group passes through the same pages, and nothing is left in /dev/shm or the arena."""
    async with BusServer(Core(QueueLimits(1, 0, 10))) as server:
        await ready(server.core)
        bus = await connect(server.address)
        for step in range(10):
            (ticket,) = await bus.admit(1, 1.0)
            big = np.full((2, 1 << 20), step, np.float32)
            await bus.put_group(ticket.issue, group(step, big=big), 1.0)
            lease = await bus.claim("actor", ("big",), num_groups=1, wait_s=1.0, step=step)
            np.testing.assert_array_equal(lease.columns["big"], big)
            more = np.full((2, 1 << 16), step, np.float64)
            await bus.write(lease.row_ids, {"more": more})
            await bus.ack([lease.lease_id], step=step)
            await bus.acknowledge("engine", step + 1)
        arena = server._arena
        assert arena.num_bytes <= 64 << 20
        paths = [Path(path) for path in arena.paths]
        assert all(path.exists() for path in paths)
        await bus.close()
        assert arena.num_free_bytes == arena.num_bytes
    assert not any(path.exists() for path in paths)


async def test_a_producer_that_dies_takes_no_data_with_it(ready, group):
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await connect(server.address)
        (ticket,) = await bus.admit(1, 1.0)
        big = np.arange(2 << 16, dtype=np.float32).reshape(2, -1)
        await bus.put_group(ticket.issue, group(0, big=big), 1.0)
        await bus.close()
        other = await connect(server.address)
        lease = await other.claim("actor", ("big",), num_groups=1, wait_s=1.0)
        np.testing.assert_array_equal(lease.columns["big"], big)
        await other.close()


def test_the_arena_joins_what_is_freed():
    arena = Arena()
    blocks = [arena.allocate(size) for size in (100, 1 << 20, 3 << 20, 64)]
    views = [block.view(np.ndarray)[10:20] for block in blocks]
    assert [arena.locate(view).offset - block.location.offset for view, block in zip(views, blocks, strict=True)] == [10] * 4
    assert arena.locate(np.zeros(3)) is None
    del blocks
    assert arena.num_free_bytes < arena.num_bytes  # a view keeps its block
    del views
    assert arena.num_free_bytes == arena.num_bytes
    assert len(arena.allocate(16 << 20)) == 16 << 20  # in one piece again
    assert len(arena.paths) == 1
    arena.close()


def test_a_full_device_is_an_error_that_says_so(monkeypatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    arena = Arena()
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(BusError, match="/dev/shm: No space left on device"):
        arena.allocate(1000)
    arena.close()


def test_files_of_a_crashed_run_are_removed(tmp_path):
    """Only those whose owner is dead, also when its number lives on in another process."""
    start = Arena().name.split("-")[3]
    mine = f"relax-arena-{os.getpid()}"
    names = [f"{mine}-{start}-aa-0", f"{mine}-123-bb-0", "relax-arena-4194303-1-cc-0", "other"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[0], "other"])
