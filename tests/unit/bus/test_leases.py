"""Leases end: by their deadline, by their consumer's end, once."""

import asyncio

import numpy as np
import pytest

from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusGone, StaleHandle, WaitTimeout


async def one_group(core, ready, group):
    await ready(core)
    (ticket,) = await core.admit(1, 0.0)
    await core.put_group(ticket.issue, group(0), 0.0)


async def test_rows_return_at_the_deadline(clock, ready, group):
    core = Core(QueueLimits(1, 0, 3, lease_s=60.0), clock=clock)
    await one_group(core, ready, group)
    lease = await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0)
    assert lease.deadline_s == 60.0
    clock.time_s = 59.9
    with pytest.raises(WaitTimeout, match="1 group leased to another consumer"):
        await core.claim("actor", ("absent",), num_groups=1, wait_s=0.0)
    clock.time_s = 60.0
    again = await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0)
    assert again.row_ids == lease.row_ids
    with pytest.raises(StaleHandle, match="ran past its 60 s and its rows went back"):
        await core.ack([lease.lease_id], step=0)
    await core.ack([again.lease_id], step=0)


async def test_a_lease_that_is_renewed_lives_on(clock, ready, group):
    """A whole lease from then on; one that has ended stays ended."""
    core = Core(QueueLimits(1, 1, 3, lease_s=60.0), clock=clock)
    await ready(core)
    for ticket in await core.admit(2, 0.0):
        await core.put_group(ticket.issue, group(0), 0.0)
    kept, lost = [await core.claim("critic", ("tokens",), num_groups=1, wait_s=0.0) for _ in range(2)]
    for clock.time_s in (59.0, 118.0, 177.0):
        await core.renew([kept.lease_id])
    await core.renew([lost.lease_id, kept.lease_id, "another life's"])
    assert set((await core.claim("critic", ("tokens",), num_groups=9, wait_s=0.0)).row_ids) == set(lost.row_ids)
    with pytest.raises(StaleHandle, match="ran past"):
        await core.ack([lost.lease_id])
    await core.ack([kept.lease_id])


async def test_a_waiting_claim_wakes_at_another_ones_deadline(ready, group):
    core = Core(QueueLimits(1, 0, 3, lease_s=0.05))
    await one_group(core, ready, group)
    lease = await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0)
    again = await core.claim("actor", ("tokens",), num_groups=1, wait_s=5.0)
    assert again.row_ids == lease.row_ids


async def test_a_second_writer_after_a_death_changes_nothing(clock, ready, group):
    """The first consumer wrote and died before it acknowledged; the second computes something slightly different. The first
    write stays, since others may have read it, and the second consumer is not punished for it."""
    core = Core(QueueLimits(1, 0, 3, lease_s=60.0), clock=clock)
    await one_group(core, ready, group)
    lease = await core.claim("critic", ("tokens",), num_groups=1, wait_s=0.0)
    await core.write(lease.row_ids, {"score": np.array([1.0, 2.0])})
    clock.time_s = 60.0
    again = await core.claim("critic", ("tokens",), num_groups=1, wait_s=0.0)
    await core.write(again.row_ids, {"score": np.array([1.5, 2.5])})
    await core.ack([again.lease_id])
    assert (await core.claim("actor", ("score",), num_groups=1, wait_s=0.0)).columns["score"].tolist() == [1.0, 2.0]
    assert (await core.stats())["ignored"] == {"rewrites": 1, "late_rows": 0}


async def test_a_writer_whose_rows_were_trained_meanwhile_is_told_nothing(clock, ready, group):
    """As above, but the trainer was quicker than the second consumer: its write has no use, and it goes on. Only after its
    lease is settled is a write an error."""
    core = Core(QueueLimits(2, 0, 3, lease_s=60.0), clock=clock)
    await ready(core)
    for ticket in await core.admit(2, 0.0):
        await core.put_group(ticket.issue, group(0), 0.0)
    lease = await core.claim("critic", ("tokens",), num_groups=1, wait_s=0.0)
    await core.write(lease.row_ids, {"score": np.array([1.0, 2.0])})
    clock.time_s = 60.0
    again = await core.claim("critic", ("tokens",), num_groups=2, wait_s=0.0)
    await core.drop([again.row_ids[2]], "poison")
    trained = await core.claim("actor", ("score",), num_groups=1, wait_s=0.0)
    await core.ack([trained.lease_id])
    await core.write(again.row_ids, {"score": np.array([1.5, 2.5, 3.5, 4.5])})
    assert (await core.claim("actor", ("score",), num_groups=1, wait_s=0.0)).columns["score"].tolist() == [4.5]
    assert (await core.stats())["ignored"] == {"rewrites": 0, "late_rows": 3}
    await core.ack([again.lease_id])
    with pytest.raises(StaleHandle, match="is gone"):
        await core.write(again.row_ids[:2], {"score": np.array([1.5, 2.5])})


async def test_a_closed_queue_ends_every_wait(ready):
    core = await ready(Core(QueueLimits(1, 0, 3)))
    waits = [
        asyncio.create_task(core.claim("actor", ("tokens",), num_groups=1, wait_s=60.0)),
        asyncio.create_task(core.next_manifest("engine", 60.0)),
        asyncio.create_task(core.events(0, 60.0)),
    ]
    await asyncio.sleep(0)
    await core.close()
    for result in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(result, BusGone)
    with pytest.raises(BusGone):
        await core.admit(1, 0.0)


async def test_a_group_is_freed_when_each_final_task_is_done(ready, group):
    core = await ready(Core(QueueLimits(1, 0, 3, final_tasks=("actor", "critic"))))
    (ticket,) = await core.admit(1, 0.0)
    await core.put_group(ticket.issue, group(0), 0.0)
    for task, held in (("critic", True), ("actor", False)):
        lease = await core.claim(task, ("tokens",), num_groups=1, wait_s=0.0, step=0)
        await core.ack([lease.lease_id], step=0)
        stats = await core.stats()
        assert (stats["bytes"]["held"] > 0) is held
        assert stats["ledger"]["trained"] == (0 if held else 1)
