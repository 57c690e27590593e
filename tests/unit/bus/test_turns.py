"""Turns on shared devices, in process and over the socket alike."""

import asyncio

import pytest

from relax.bus.client import connect
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, StaleHandle, WaitTimeout

LIMITS = QueueLimits(prompts_per_step=4, max_staleness=1, num_steps=3)


async def test_engines_and_trainer_take_turns(queue, manifest):
    """Recalled weights are given up once nobody holds the engines; nothing is admitted meanwhile; an announcement ends it."""
    await queue.subscribe("engine", takes_turns=True)
    await queue.announce(manifest(0))
    assert await queue.next_manifest("engine", 1.0) == manifest(0)
    await queue.acknowledge("engine", 0)
    await queue.admit(1, 1.0)
    await queue.hold_engines("evaluation", 1.0)
    recall = asyncio.create_task(queue.recall(5.0))
    await asyncio.sleep(0.02)
    with pytest.raises(WaitTimeout, match="the trainer, whose turn it is, to announce its next version"):
        await queue.admit(1, 0.0)
    following = asyncio.create_task(queue.next_manifest("engine", 5.0))
    await asyncio.sleep(0.02)
    assert not following.done()
    assert (await queue.stats())["turn"] == {
        "recalled": True,
        "trainers": False,
        "holders": ["evaluation"],
        "to_give_up": ["engine"],
    }
    await queue.let_go("evaluation")
    assert await following is None
    assert not recall.done()
    await queue.gave_up("engine")
    await recall
    assert (await queue.stats())["versions"]["acknowledged"] == {"engine": None}
    assert (await queue.stats())["turn"]["trainers"]
    await queue.recall(0.0)  # it is the trainer's turn already
    holding = asyncio.create_task(queue.hold_engines("evaluation", 5.0))
    following = asyncio.create_task(queue.next_manifest("engine", 5.0))
    await asyncio.sleep(0.02)
    assert not holding.done()
    assert not following.done()
    await queue.announce(manifest(1))
    await holding
    assert await following == manifest(1)
    await queue.acknowledge("engine", 1)
    assert (await queue.admit(1, 1.0))[0].version == 1


async def test_a_recall_that_ran_out_of_time_goes_on(queue, manifest):
    await queue.subscribe("engine", takes_turns=True)
    await queue.announce(manifest(0))
    with pytest.raises(WaitTimeout, match=r"recall: .* engine to give the weights up"):
        await queue.recall(0.0)
    assert await queue.next_manifest("engine", 1.0) is None  # although there is a version that it has not taken
    await queue.gave_up("engine")
    await queue.recall(0.0)
    with pytest.raises(WaitTimeout, match="the trainer, whose turn it is"):
        await queue.next_manifest("engine", 0.0)


async def test_receivers_with_devices_of_their_own_are_left_alone(queue, manifest):
    await queue.subscribe("reference")
    await queue.recall(0.0)
    await queue.announce(manifest(0))
    await queue.recall(0.0)
    assert await queue.next_manifest("reference", 0.0) == manifest(0)


async def test_the_same_version_announced_again_gives_the_devices_back(queue, manifest):
    await queue.subscribe("engine", takes_turns=True)
    await queue.announce(manifest(0))
    await queue.acknowledge("engine", 0)
    with pytest.raises(WaitTimeout):
        await queue.recall(0.0)
    await queue.gave_up("engine")
    await queue.announce(manifest(0))
    assert await queue.next_manifest("engine", 1.0) == manifest(0)


async def test_who_begins_anew_while_recalled_has_nothing_to_give_up(queue, manifest):
    for name in ("a", "b"):
        await queue.subscribe(name, takes_turns=True)
        await queue.acknowledge(name, 0)
    waiting = asyncio.create_task(queue.recall(5.0))
    await asyncio.sleep(0.02)
    await queue.subscribe("a", takes_turns=True)
    await queue.unsubscribe("b")
    await waiting
    with pytest.raises(WaitTimeout):
        await queue.next_manifest("a", 0.0)
    with pytest.raises(BusError, match="'b' has not subscribed"):
        await queue.gave_up("b")
    await queue.announce(manifest(3))
    assert await queue.next_manifest("a", 1.0) == manifest(3)


async def test_whoever_dies_holds_nothing_up():
    """An engine that was to give its weights up, and an evaluation that held the engines."""
    async with BusServer(Core(LIMITS)) as server:
        engine, evaluation, actor = [await connect(server.address) for _ in range(3)]
        await engine.subscribe("engine", takes_turns=True)
        await evaluation.hold_engines("evaluation", 1.0)
        waiting = asyncio.create_task(actor.recall(5.0))
        await asyncio.sleep(0.02)
        await engine.close()
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await evaluation.close()
        await waiting
        await actor.close()


async def test_a_successor_keeps_what_its_predecessor_loses(manifest):
    """A restarted engine takes the name of the one that is found dead a moment later."""
    async with BusServer(Core(LIMITS)) as server:
        old, new = await connect(server.address), await connect(server.address)
        await old.subscribe("engine", takes_turns=True)
        await old.hold_engines("evaluation", 1.0)
        await new.subscribe("engine", takes_turns=True)
        await new.hold_engines("evaluation", 1.0)
        await old.close()
        stats = await new.stats()
        assert stats["versions"]["acknowledged"] == {"engine": None}
        assert stats["turn"]["holders"] == ["evaluation"]
        await new.close()
        assert server.core.versions.held == {}
        assert server.core.versions.turns.holders == set()


async def test_a_hold_that_nobody_waits_for_any_more_is_undone(manifest):
    async with BusServer(Core(LIMITS)) as server:
        bus = await connect(server.address)
        await bus.recall(1.0)
        holding = asyncio.create_task(bus.hold_engines("evaluation", 5.0))
        await asyncio.sleep(0.02)
        server.core.versions.turns.end_recall()
        server.core.waits.notify("engines")
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await bus.stats()
        assert server.core.versions.turns.holders == set()
        await bus.close()


# -- the trainer goes back ------------------------------------------------------------------------------------------------


async def test_the_trainer_goes_back(queue, group, manifest, ready):
    """To step 1 of 3, with one group trained there, one queued, one leased, one ticket out and one prompt waiting."""
    await ready(queue)
    await queue.announce(manifest(0))
    for step in (0, 1):
        for ticket in await queue.admit(4, 1.0):
            await queue.put_group(ticket.issue, group(step), 1.0)
        lease = await queue.claim("actor", ("tokens",), num_groups=4, at_least=4, wait_s=1.0, step=step)
        await queue.ack([lease.lease_id], step=step)
        await queue.announce(manifest(step + 1))
        await queue.acknowledge("engine", step + 1)
    tickets = await queue.admit(4, 1.0)
    for ticket in tickets[:3]:
        await queue.put_group(ticket.issue, group(2), 1.0)
    leased = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0, step=2)
    dropped = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0, step=2)
    await queue.drop(dropped.row_ids, "poison", reissue=True)
    following = asyncio.create_task(queue.next_manifest("engine", 5.0))

    await queue.rewind(1)
    with pytest.raises(StaleHandle, match="lost with the trainer: it goes back to step 1"):
        await queue.ack([leased.lease_id], step=2)
    await queue.renew([leased.lease_id])  # left out
    with pytest.raises(StaleHandle):
        await queue.put_group(tickets[3].issue, group(2), 1.0)
    with pytest.raises(StaleHandle):
        await queue.forfeit(tickets[3].issue, "failed", "late")
    with pytest.raises(StaleHandle):
        await queue.write(leased.row_ids, {"score": [1, 2]})
    with pytest.raises(StaleHandle, match="version 2 is lost with the trainer"):
        await queue.acknowledge("engine", 2)
    stats = await queue.stats()
    assert stats["ledger"] == {"issued": 12, "in_flight": 0, "trained": 4, "filtered": 0, "failed": 0, "dropped": 8}
    assert stats["versions"]["acknowledged"] == {"engine": None}
    assert stats["versions"]["newest"] is None
    assert (stats["rewinds"], stats["tickets"]["prompts_to_reissue"]) == (1, 8)
    assert sum(stats["age"]["histogram"].values()) == 4
    with pytest.raises(WaitTimeout, match="engine to acknowledge a first policy version"):
        await queue.admit(1, 0.0)

    await queue.announce(manifest(1))
    assert await following == manifest(1)
    await queue.acknowledge("engine", 1)
    for step in (1, 2):
        tickets = await queue.admit(4, 1.0)
        assert [(t.issue, t.prompt, t.batch) for t in tickets] == [(8 + 4 * step + i, 4 * step + i, step) for i in range(4)]
        for ticket in tickets:
            await queue.put_group(ticket.issue, group(step), 1.0)
        lease = await queue.claim("actor", ("tokens",), num_groups=4, at_least=4, wait_s=1.0, step=step)
        await queue.ack([lease.lease_id], step=step)
        await queue.announce(manifest(step + 1))
        await queue.acknowledge("engine", step + 1)
    stats = await queue.stats()
    assert (stats["is_finished"], stats["reissued"]) == (True, 8)


async def test_calls_that_wait_find_out_that_the_trainer_went_back(group, manifest, ready):
    """A put ends, a claim goes on with what comes then."""
    core = await ready(Core(QueueLimits(1, 1, 9, max_bytes=100)))
    first, second = await core.admit(9, 0.0)
    await core.put_group(first.issue, group(0), 0.0)
    with pytest.raises(WaitTimeout):
        await core.claim("actor", ("absent",), num_groups=1, wait_s=0.0, step=0)
    putting = asyncio.create_task(core.put_group(second.issue, group(0), 5.0))
    claiming = asyncio.create_task(core.claim("actor", ("tokens", "score"), num_groups=1, wait_s=5.0, step=0))
    await asyncio.sleep(0.01)
    assert not putting.done()
    await core.rewind(0)
    with pytest.raises(StaleHandle):
        await putting
    await core.announce(manifest(0))
    await core.acknowledge("engine", 0)
    (ticket,) = await core.admit(1, 0.0)
    await core.put_group(ticket.issue, group(0, score=[1, 2]), 0.0)
    assert set((await claiming).group_ids) == {ticket.issue}


@pytest.mark.parametrize("step", [-1, 1])
async def test_the_trainer_cannot_go_where_it_has_not_been(step):
    with pytest.raises(BusError, match=f"cannot go back to step {step}: it knows steps 0 to 0"):
        await Core(LIMITS).rewind(step)


async def test_with_two_final_tasks_there_is_no_way_back():
    with pytest.raises(BusError, match="more than one final task: actor, critic"):
        await Core(QueueLimits(1, 0, 1, final_tasks=("actor", "critic"))).rewind(0)
