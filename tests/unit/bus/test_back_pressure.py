"""Producers wait for bytes, but never for a step that cannot be completed without them."""

import asyncio

import numpy as np
import pytest

from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, WaitTimeout


def wide(group, version=0):
    return group(version, payload=np.zeros((2, 512), np.uint8))  # a little above 1 KiB


async def test_a_put_waits_until_rows_are_freed(ready, group):
    core = await ready(Core(QueueLimits(2, 3, 9, max_bytes=2400)))
    tickets = await core.admit(6, 0.0)
    with pytest.raises(WaitTimeout):
        await core.claim("actor", ("tokens",), num_groups=2, wait_s=0.0, step=0)
    for ticket in tickets[:2]:
        await core.put_group(ticket.issue, wide(group), 0.0)
    with pytest.raises(WaitTimeout, match=r"put_group 2.* room for \d+ bytes: \d+ of 2400 are taken"):
        await core.put_group(tickets[2].issue, wide(group), 0.0)
    waiting = asyncio.create_task(core.put_group(tickets[2].issue, wide(group), 5.0))
    lease = await core.claim("actor", ("tokens",), num_groups=2, wait_s=0.0, step=0)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert (await core.stats())["waits"][0]["call"] == "put_group 2"
    await core.ack([lease.lease_id], step=0)
    assert len(await waiting) == 2
    assert (await core.stats())["waited_s"]["put_group"] > 0


async def test_a_step_larger_than_the_memory_is_completed_all_the_same(ready, group):
    """Otherwise the trainer would wait for the last group, and the last group for the trainer."""
    core = await ready(Core(QueueLimits(4, 1, 9, max_bytes=2400)))
    tickets = await core.admit(8, 0.0)
    leases = []
    for ticket in tickets[:4]:
        with pytest.raises(WaitTimeout):
            await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0)
        await core.put_group(ticket.issue, wide(group), 0.0)
        leases.append(await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0))
    with pytest.raises(WaitTimeout):
        await core.put_group(tickets[4].issue, wide(group), 0.0)
    await core.ack([lease.lease_id for lease in leases], step=0)


async def test_an_old_straggler_gets_in_although_young_groups_fill_the_queue(ready, group):
    core = await ready(Core(QueueLimits(1, 1, 9, max_bytes=1400)))
    first, straggler = await core.admit(2, 0.0)
    await core.put_group(first.issue, wide(group), 0.0)
    lease = await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0)
    await core.ack([lease.lease_id], step=0)
    await core.acknowledge("engine", 1)
    (young,) = await core.admit(9, 0.0)
    await core.put_group(young.issue, wide(group, 1), 0.0)
    await core.put_group(straggler.issue, wide(group), 0.0)
    lease = await core.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=1)
    assert set(lease.group_ids) == {straggler.issue}


async def test_a_group_that_can_never_fit_is_refused(ready, group):
    core = await ready(Core(QueueLimits(2, 0, 9, max_bytes=500)))
    (ticket,) = await core.admit(1, 0.0)
    with pytest.raises(BusError, match=r"services\.queue_max_bytes"):
        await core.put_group(ticket.issue, wide(group), 0.0)
