"""Messages that get lost on the way: no call hangs, and none is done twice."""

import asyncio
import contextlib
from random import Random

import numpy as np
import pytest

from relax.bus.client import connect
from relax.bus.core import Core
from relax.bus.ledger import Ledger
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, StaleHandle, WaitTimeout

LIMITS = QueueLimits(prompts_per_step=3, max_staleness=1, num_steps=5, in_order=True, num_extra=1)


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch):
    monkeypatch.setattr("relax.bus.calls.BEAT_S", 0.01)
    monkeypatch.setattr("relax.bus.calls.SILENCE_BEATS", 500)


class Loss:
    """Loses a share of the messages, or those that the test names."""

    def __init__(self, share: float = 0.0, seed: int = 0) -> None:
        self._random, self.share = Random(seed), share
        self.next: list[bool] = []
        self.num_lost = 0

    def __call__(self) -> bool:
        lost = self.next.pop(0) if self.next else self._random.random() < self.share
        self.num_lost += lost
        return lost


async def patiently(call):
    """Makes a call again for as long as it has to wait."""
    while True:
        try:
            return await call()
        except WaitTimeout:
            continue


@pytest.mark.parametrize("seed", range(3))
async def test_a_whole_run_that_loses_a_fifth_of_its_messages(group, manifest, tmp_path, seed):
    """Requests and answers of all clients are lost, of every kind of call: the run is what it would have been without."""
    losses = [Loss(0.2, 10 * seed + index) for index in range(3)]
    ledger = Ledger(tmp_path / "ledger.sqlite")
    core = Core(LIMITS, ledger=ledger)
    async with BusServer(core) as server:
        producer, critic, actor = [await connect(server.address, drop=loss) for loss in losses]
        await producer.subscribe("engine")
        prompts: list[int] = []

        async def produce() -> None:
            count = 0
            while tickets := await patiently(lambda: producer.admit(2, 0.05)):
                for ticket in tickets:
                    count += 1
                    await producer.emit({"kind": "ticket", "issue": ticket.issue, "prompt": ticket.prompt})
                    if count == 4:
                        await producer.forfeit(ticket.issue, "filtered", "for the test")
                        continue
                    big = np.full((2, 6000), ticket.issue, np.float32)  # through the arena
                    columns, media = group(ticket.version, big=big), {"pixel_values": big.reshape(-1)}
                    with contextlib.suppress(StaleHandle):  # the run is complete without it
                        await patiently(lambda t=ticket, c=columns, m=media: producer.put_group(t.issue, c, 0.05, m))

        async def criticise() -> None:
            while True:
                lease = await patiently(lambda: critic.claim("critic", ("big",), num_groups=2, wait_s=0.05))
                assert lease.columns["big"][:, 0].tolist() == list(lease.group_ids)
                await critic.write(lease.row_ids, {"score": lease.columns["big"] + 1})
                await critic.ack([lease.lease_id])

        async def train() -> None:
            await actor.announce(manifest(0))
            await producer.acknowledge("engine", (await patiently(lambda: producer.next_manifest("engine", 0.05))).version)
            for step in range(LIMITS.num_steps):
                leases, left = [], LIMITS.prompts_per_step
                while left:
                    need = left
                    lease = await patiently(
                        lambda n=need, s=step: actor.claim("actor", ("score",), num_groups=n, wait_s=0.05, step=s, shared=True)
                    )
                    assert lease.shared.keys() == set(lease.group_ids)
                    assert all(np.all(arrays["pixel_values"] == issue) for issue, arrays in lease.shared.items())
                    assert (lease.columns["score"][:, 0] - 1).tolist() == list(lease.group_ids)
                    leases.append(lease)
                    left -= len(set(lease.group_ids))
                await actor.ack([lease.lease_id for lease in leases], step=step)
                prompts.extend(trained.prompt for trained in core.tickets.trained_at[step])
                await actor.announce(manifest(step + 1))
                await producer.acknowledge("engine", step + 1)

        criticising = asyncio.create_task(criticise())
        async with asyncio.timeout(30):
            await asyncio.gather(produce(), train())
        criticising.cancel()
        await asyncio.gather(criticising, return_exceptions=True)
        assert len(prompts) == len(set(prompts)) == 15
        stats = await actor.stats()
        assert stats["ledger"]["trained"] == 15
        assert stats["ledger"]["in_flight"] == 0
        assert stats["ignored"]["rewrites"] == 0
        told = await actor.events(0, 0.0)
        assert len({event["issue"] for event in told}) == len(told) == stats["ledger"]["issued"]
        assert min(loss.num_lost for loss in losses) > 10
        for client in (producer, critic, actor):
            await client.close()
        assert server._sessions == {}
    assert ledger.path.exists()


async def pinged_by_hand(address: str, loss: Loss):
    """A client that pings only when the test says so: the order of its messages is known."""
    bus = await connect(address, drop=loss)
    bus._calls._heart.cancel()
    await asyncio.sleep(0.01)
    return bus


async def lose(bus, loss: Loss, *lost: bool) -> None:
    """What is on its way goes; the ping that follows and its answer arrive."""
    await asyncio.sleep(0.02)
    assert loss.next == []
    loss.next = list(lost)
    bus._calls._ping()


@pytest.mark.parametrize(
    ("first", "second"),
    [([True], []), ([False, True], []), ([True], [False, False, True]), ([False, True], [False, False, False, True])],
    ids=["request", "answer", "request twice", "answer twice"],
)
async def test_a_call_is_done_once_whatever_is_lost(first, second, ready):
    loss = Loss()
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await pinged_by_hand(server.address, loss)
        loss.next = list(first)
        admitting = asyncio.create_task(bus.admit(1, 1.0))
        await lose(bus, loss, *second)
        if second:
            await lose(bus, loss)
        assert [ticket.issue for ticket in await admitting] == [0]
        assert [ticket.issue for ticket in await bus.admit(1, 1.0)] == [1]
        assert loss.num_lost == sum(first + second)
        assert bus._calls.num_resent == 1 + bool(second)
        await bus.close()


async def test_a_call_that_waits_is_not_made_again(ready):
    """The server says that it is at work on it."""
    async with BusServer(Core(LIMITS)) as server:
        bus = await connect(server.address)
        waiting = asyncio.create_task(bus.admit(1, 5.0))
        await asyncio.sleep(0.1)
        assert bus._calls.num_resent == 0
        await ready(server.core)
        assert [ticket.issue for ticket in await waiting] == [0]
        await bus.close()


async def test_a_lost_cancellation_is_repeated(ready, group):
    """Otherwise the rows would be in the hands of nobody until the lease ends."""
    loss = Loss()
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        (ticket,) = await server.core.admit(1, 1.0)
        await server.core.put_group(ticket.issue, group(0), 1.0)
        bus = await pinged_by_hand(server.address, loss)
        claiming = asyncio.create_task(bus.claim("actor", ("tokens",), num_groups=1, wait_s=5.0))
        await asyncio.sleep(0)  # the request is on its way
        loss.next = [True, True]  # the cancellation, and the claim's answer
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
        await lose(bus, loss)
        lease = await server.core.claim("actor", ("tokens",), num_groups=1, wait_s=5.0)
        assert lease.group_ids == (0, 0)
        assert loss.num_lost == 2
        await bus.close()


async def test_an_answer_that_is_no_longer_remembered_is_an_error(monkeypatch, ready):
    """Rather than doing the call again."""
    monkeypatch.setattr("relax.bus.sessions._MAX_ANSWERS", 0)
    loss = Loss()
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await pinged_by_hand(server.address, loss)
        loss.next = [False, True]
        admitting = asyncio.create_task(bus.admit(1, 1.0))
        await lose(bus, loss)
        with pytest.raises(BusError, match="admit was done, but its answer was lost"):
            await admitting
        await bus.close()


async def test_what_is_remembered_is_forgotten_once_the_client_has_it(ready):
    async with BusServer(Core(LIMITS)) as server:
        await ready(server.core)
        bus = await connect(server.address)
        for _ in range(50):
            await bus.stats()
        (session,) = server._sessions.values()
        await asyncio.sleep(0.05)
        assert len(session._answers) < 5
        assert session._num_bytes == sum(size for _, size in session._sizes)
        await bus.close()


async def test_a_greeting_and_a_goodbye_may_be_lost():
    loss = Loss()
    async with BusServer(Core(LIMITS)) as server:
        loss.next = [True, False, True]
        bus = await connect(server.address, drop=loss)
        assert len(server._sessions) == 1
        loss.next = [True, False, True]
        await bus.close()
        assert server._sessions == {}
