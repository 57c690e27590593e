"""The staleness bound: nothing is ever consumed too old, and nothing has to be thrown away for it."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.bus.core import Core
from relax.bus.staleness import Places
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, WaitTimeout


async def claim(core, step, num_groups=1, **more):
    return await core.claim("actor", ("tokens",), num_groups=num_groups, wait_s=0.0, step=step, **more)


@pytest.mark.parametrize(
    ("bound", "version", "admitted"),
    [(0, 0, 2), (0, 1, 4), (1, 0, 4), (1, 1, 6), (2, 0, 6), (2, 3, 10), (9, 0, 10)],
)
async def test_admission_runs_ahead_by_exactly_the_bound(bound, version, admitted, ready):
    """Two prompts a step, five steps: places of batches 0 to version + bound are given, and never more than the run has."""
    core = await ready(Core(QueueLimits(2, bound, 5)), version)
    tickets = await core.admit(99, 0.0)
    assert len(tickets) == admitted
    assert [ticket.batch for ticket in tickets] == [index // 2 for index in range(admitted)]
    assert {ticket.version for ticket in tickets} == {version}
    with pytest.raises(WaitTimeout):
        await core.admit(1, 0.0)


async def test_a_forfeited_place_is_given_again_in_its_batch(ready):
    core = await ready(Core(QueueLimits(2, 0, 5)))
    first, second = await core.admit(9, 0.0)
    await core.forfeit(first.issue, "filtered", "no signal")
    (third,) = await core.admit(9, 0.0)
    assert (third.issue, third.batch) == (2, 0)
    assert second.batch == 0


async def test_nothing_is_admitted_before_every_receiver_holds_a_version(ready):
    core = await ready(Core(QueueLimits(2, 1, 5)), None)
    with pytest.raises(WaitTimeout, match="engine to acknowledge a first policy version"):
        await core.admit(1, 0.0)
    await core.unsubscribe("engine")
    with pytest.raises(WaitTimeout, match="first receiver of weights to subscribe"):
        await core.admit(1, 0.0)


async def test_a_full_run_waits_for_a_forfeit_and_ends_when_all_is_trained(ready, group):
    core = await ready(Core(QueueLimits(1, 5, 2)))
    tickets = await core.admit(9, 0.0)
    assert len(tickets) == 2
    with pytest.raises(WaitTimeout, match="one of the run's 2 places"):
        await core.admit(1, 0.0)
    await core.forfeit(tickets[1].issue, "failed", "engine lost")
    tickets[1:] = await core.admit(1, 0.0)
    for step, ticket in enumerate(tickets):
        await core.put_group(ticket.issue, group(0), 0.0)
        lease = await claim(core, step)
        await core.ack([lease.lease_id], step=step)
    assert await core.admit(1, 0.0) == []


async def test_groups_that_would_age_out_have_precedence(ready, group):
    """Bound 1: step 1 keeps its places for the old group that is still being generated, and gives only the other one away."""
    core = await ready(Core(QueueLimits(2, 1, 5)))
    a, b, c, d = await core.admit(9, 0.0)
    for ticket in (a, b, c):
        await core.put_group(ticket.issue, group(0), 0.0)
    first = await claim(core, 0, 9)
    assert first.group_ids == (0, 0, 1, 1)
    await core.ack([first.lease_id], step=0)
    await core.acknowledge("engine", 1)
    for ticket in await core.admit(9, 0.0):
        await core.put_group(ticket.issue, group(1), 0.0)
    assert set((await claim(core, 1, 9)).group_ids) == {c.issue}  # young groups are ready, but d needs the last place
    with pytest.raises(WaitTimeout) as caught:
        await claim(core, 1)
    assert "2 groups ready but held back" in caught.value.reason
    assert f"still being generated: issue {d.issue}" in caught.value.reason
    await core.put_group(d.issue, group(0), 0.0)
    assert set((await claim(core, 1, 9)).group_ids) == {d.issue}


async def test_a_young_group_cannot_push_two_steps_of_old_ones_into_one(ready, group):
    """Bound 2, one prompt a step: at step 1 no group is too old for step 2 yet, but two that are due there leave no room."""
    core = await ready(Core(QueueLimits(1, 2, 9)))
    a, b, _ = await core.admit(9, 0.0)
    await core.put_group(a.issue, group(0), 0.0)
    await core.ack([(await claim(core, 0)).lease_id], step=0)
    await core.acknowledge("engine", 1)
    (young,) = await core.admit(9, 0.0)
    await core.put_group(young.issue, group(1), 0.0)
    with pytest.raises(WaitTimeout, match="held back"):
        await claim(core, 1)
    await core.put_group(b.issue, group(0), 0.0)
    assert set((await claim(core, 1)).group_ids) == {b.issue}


async def test_a_group_counts_as_old_as_its_oldest_token(ready, group):
    """A group that was admitted early but sampled late is not urgent any more once its rows say so."""
    core = await ready(Core(QueueLimits(1, 1, 9)))
    a, b = await core.admit(9, 0.0)
    await core.put_group(a.issue, group(0), 0.0)
    await core.ack([(await claim(core, 0)).lease_id], step=0)
    await core.acknowledge("engine", 1)
    (young,) = await core.admit(9, 0.0)
    await core.put_group(young.issue, group(1), 0.0)
    with pytest.raises(WaitTimeout):
        await claim(core, 1)
    await core.put_group(b.issue, group(1), 0.0)
    assert set((await claim(core, 1)).group_ids) == {b.issue}
    assert set((await claim(core, 2)).group_ids) == {young.issue}


async def test_at_bound_0_only_the_present_version_is_trained(ready, group):
    core = await ready(Core(QueueLimits(2, 0, 4)))
    for step in range(4):
        tickets = await core.admit(99, 0.0)
        assert [(ticket.batch, ticket.version) for ticket in tickets] == [(step, step)] * 2
        for ticket in reversed(tickets):
            await core.put_group(ticket.issue, group(step), 0.0)
        lease = await core.claim("actor", ("versions",), num_groups=2, wait_s=0.0, step=step)
        assert lease.columns["versions"].tolist() == [step] * 4
        assert list(lease.group_ids) == sorted(lease.group_ids)
        await core.ack([lease.lease_id], step=step)
        await core.acknowledge("engine", step + 1)


async def test_a_step_has_exactly_its_places(ready, group):
    """More than `prompts_per_step` groups are refused, a step is acknowledged whole and in order, and not twice."""
    core = await ready(Core(QueueLimits(2, 1, 5)))
    for ticket in await core.admit(9, 0.0):
        await core.put_group(ticket.issue, group(0), 0.0)
    one = await claim(core, 0)
    with pytest.raises(BusError, match="the leases hold 1 of its 2 groups"):
        await core.ack([one.lease_id], step=0)
    with pytest.raises(BusError, match="claimed for step 0, but is acknowledged with step=None"):
        await core.ack([one.lease_id])
    two = await claim(core, 0)
    with pytest.raises(BusError, match="all 2 groups of step 0 are claimed"):
        await claim(core, 0)
    ahead = await claim(core, 1, 9)
    with pytest.raises(BusError, match="next step of actor is 0"):
        await core.ack([ahead.lease_id], step=1)
    await core.release(two.lease_id)
    two = await claim(core, 0, 9)
    await core.ack([one.lease_id, two.lease_id], step=0)
    with pytest.raises(BusError, match="step 0 is trained already"):
        await claim(core, 0)
    with pytest.raises(BusError, match="outside the run's 5 steps"):
        await claim(core, 5)
    await core.ack([ahead.lease_id], step=1)
    assert (await core.stats())["age"]["histogram"] == {"0": 2, "1": 2}


async def test_a_group_past_the_bound_is_reported_and_not_delivered(ready, group):
    """It cannot happen by the rules; if the arithmetic were wrong, the run would stop instead of training on it."""
    core = await ready(Core(QueueLimits(1, 1, 9)))
    (ticket, _) = await core.admit(9, 0.0)
    await core.put_group(ticket.issue, group(0), 0.0)
    with pytest.raises(WaitTimeout):
        await core.claim("actor", ("absent",), num_groups=1, wait_s=0.0, step=0)
    core.claims.tasks["actor"].places.next_step = 5
    with pytest.raises(BusError, match="a fault of the transfer queue"):
        await claim(core, 5)
    assert (await core.stats())["age"]["violations"] == 1


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(1, 3),
    bound=st.integers(0, 4),
    choices=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=150),
)
def test_whatever_the_order_of_arrival_all_is_consumed_in_time(prompts, bound, choices):
    """Groups arrive in any order, the trainer takes what it gets, publications lag: no age above the bound, and after the
    stragglers have come the step can always be completed."""
    places = Places(prompts)
    generating: list[int] = []
    present: list[int] = []
    used = version = 0

    def admit() -> None:
        nonlocal used
        while used // prompts - version <= bound:
            generating.append(version)
            places.add(version + bound)
            used += 1

    def consume() -> bool:
        step = places.next_step
        for oldest in sorted(present):
            if places.free(step) and places.may_take(step, oldest + bound):
                assert 0 <= step - oldest <= bound
                places.take(step, oldest + bound)
                present.remove(oldest)
                return True
        return False

    def commit() -> None:
        if not places.free(places.next_step):
            places.close(places.next_step)

    for action, pick in choices:
        admit()
        if action in (0, 1) and generating:
            present.append(generating.pop(pick % len(generating)))
        elif action == 2:
            consume()
            commit()
        elif action == 3:
            version = places.next_step
        assert places.too_old() is None
        assert all(places.slack(step) >= 0 for step in range(places.next_step, places.next_step + bound + 2))
    version = places.next_step
    admit()
    present += generating
    while places.free(places.next_step):
        assert consume()


async def test_a_lost_ticket_is_given_again_before_new_ones(ready):
    core = await ready(Core(QueueLimits(4, 0, 9)))
    tickets = await core.admit(3, 0.0)
    core.give_again([tickets[2].issue, tickets[0].issue])
    core.give_again([tickets[0].issue])
    with contextlib.suppress(WaitTimeout):
        assert [ticket.issue for ticket in await core.admit(9, 0.0)] == [0, 2, 3]
