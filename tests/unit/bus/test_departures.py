"""Groups that no step trains: left behind, surplus, dropped by hand; and what becomes of their prompts."""

import pytest

from relax.bus.core import Core
from relax.bus.ledger import Ledger
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, StaleHandle, WaitTimeout


async def claim(core, step, num_groups=1, **more):
    return await core.claim("actor", ("tokens",), num_groups=num_groups, wait_s=0.0, step=step, **more)


async def train(core, step, num_groups) -> list[int]:
    """Trains step `step` and publishes; returns the issues."""
    lease = await claim(core, step, num_groups, at_least=num_groups)
    await core.ack([lease.lease_id], step=step)
    await core.acknowledge("engine", (step + 1) * core.limits.updates_per_step)
    return sorted(set(lease.group_ids))


async def put(core, group, *tickets, newest=None) -> None:
    for ticket in tickets:
        await core.put_group(ticket.issue, group(ticket.version, newest=newest), 0.0)


def fates(path) -> dict[int, tuple[int, str, str]]:
    """Issue -> (prompt, fate, reason)."""
    rows = Ledger(path)._execute("SELECT issue, prompt, fate, reason FROM issues", ()).fetchall()
    return {issue: (prompt, fate, reason) for issue, prompt, fate, reason in rows}


# -- several updates a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "updates", "version", "last_batch"),
    [(1, 2, 0, 0), (2, 2, 0, 0), (3, 2, 0, 1), (3, 2, 2, 2), (5, 3, 3, 2), (2, 1, 4, 6)],
)
async def test_every_update_of_a_step_counts_as_age(bound, updates, version, last_batch, ready):
    """Tickets are given for batch `b` while `(b + 1) U - 1 - version <= K`, and never for one more."""
    core = await ready(Core(QueueLimits(2, bound, 20, updates_per_step=updates)), version)
    assert max(ticket.batch for ticket in await core.admit(99, 0.0)) == last_batch
    assert (last_batch + 1) * updates - 1 - version <= bound < (last_batch + 2) * updates - 1 - version
    with pytest.raises(WaitTimeout, match=f"engine holds version {version}"):
        await core.admit(1, 0.0)


async def test_ages_are_counted_in_updates(ready, group):
    core = await ready(Core(QueueLimits(1, 3, 3, updates_per_step=2)))
    first, second = await core.admit(9, 0.0)
    await put(core, group, first, second)
    await train(core, 0, 1)
    await train(core, 1, 1)
    assert (await core.stats())["age"]["histogram"] == {"1": 1, "3": 1}


# -- drop -----------------------------------------------------------------------------------------------------------------


async def test_a_step_does_not_wait_for_a_straggler_that_may_be_dropped(ready, group, tmp_path):
    """Bound 1: while issue 0 is generated, young groups take its place; when it comes it is too old, and its prompt is next."""
    core = await ready(Core(QueueLimits(2, 1, 4, on_stale="drop"), ledger=Ledger(tmp_path / "ledger")))
    straggler, *others = await core.admit(9, 0.0)
    await put(core, group, *others)
    await train(core, 0, 2)
    young = await core.admit(9, 0.0)
    await put(core, group, *young)
    assert await train(core, 1, 2) == [3, 4]  # the oldest first
    ids = await core.put_group(straggler.issue, group(0), 0.0)
    assert await core.put_group(straggler.issue, group(0), 0.0) == ids
    assert straggler.issue not in core.rows.groups
    again = await core.admit(9, 0.0)
    assert [(ticket.issue, ticket.prompt) for ticket in again] == [(6, 0), (7, 6), (8, 7)]
    stats = await core.stats()
    assert stats["stale"] == {"dropped": 1, "masked": 0, "surplus": 0}
    assert stats["reissued"] == 1
    await put(core, group, *again)
    await train(core, 2, 2)
    await train(core, 3, 2)
    await core.close()
    told = fates(tmp_path / "ledger")
    assert told[0] == (0, "dropped", "too old: version 0 would be 2 updates old at step 2, the bound is 1")
    assert told[6] == (0, "trained", "")


async def test_groups_that_are_ready_but_unclaimed_are_left_behind_by_their_last_step(ready, group):
    """Two groups too many of version 0 are there when step 1 ends, as the trainer took younger ones ahead of it."""
    core = await ready(Core(QueueLimits(2, 1, 9, on_stale="drop")))
    tickets = await core.admit(9, 0.0)
    await put(core, group, *tickets)
    await train(core, 0, 2)
    critic = await core.claim("critic", ("tokens",), num_groups=9, wait_s=0.0)
    young = await core.admit(9, 0.0)
    await put(core, group, *young)
    lease = await core.claim("actor", ("tokens",), num_groups=2, wait_s=0.0)  # somebody takes the old ones without a step
    assert set(lease.group_ids) == {2, 3}
    assert await train(core, 1, 2) == [4, 5]
    await core.release(lease.lease_id)
    young = await core.admit(9, 0.0)
    await put(core, group, *young)
    assert 2 in core.rows.groups  # given back too late: the end of the next step finds them
    await train(core, 2, 2)
    assert not {2, 3} & core.rows.groups.keys()
    assert (await core.stats())["stale"]["dropped"] == 2
    await core.ack([critic.lease_id])  # nothing is left of it but its name
    assert [ticket.prompt for ticket in await core.admit(2, 0.0)] == [2, 3]


async def test_a_group_that_is_claimed_is_not_left_behind(ready, group):
    core = await ready(Core(QueueLimits(1, 1, 9, on_stale="drop")))
    await put(core, group, *await core.admit(9, 0.0))
    ahead = await claim(core, 1)
    await train(core, 0, 1)
    await core.ack([ahead.lease_id], step=1)
    assert (await core.stats())["stale"]["dropped"] == 0


async def test_a_late_group_does_not_wait_for_room(ready, group):
    core = await ready(Core(QueueLimits(1, 1, 9, max_bytes=100, on_stale="drop")))
    straggler, other = await core.admit(9, 0.0)
    await put(core, group, other)
    for step in range(3):
        await train(core, step, 1)
        await put(core, group, *await core.admit(1, 0.0))
    assert core.rows.num_bytes > 50
    await put(core, group, straggler)


# -- mask -----------------------------------------------------------------------------------------------------------------


async def test_a_masked_group_is_due_by_its_newest_token(ready, group):
    """A straggler of version 0 with a token of version 1 stays for step 2, and goes first there."""
    core = await ready(Core(QueueLimits(1, 1, 9, on_stale="mask")))
    straggler, other = await core.admit(9, 0.0)
    await put(core, group, other, newest=0)
    await train(core, 0, 1)
    await put(core, group, *await core.admit(9, 0.0), newest=1)
    await train(core, 1, 1)
    await core.put_group(straggler.issue, group(0, newest=1), 0.0)
    assert straggler.issue in core.rows.groups
    await put(core, group, *await core.admit(9, 0.0), newest=2)
    assert set((await claim(core, 2)).group_ids) == {straggler.issue}


async def test_a_masked_group_that_spans_versions_is_trained_and_counted(ready, group):
    core = await ready(Core(QueueLimits(1, 1, 9, on_stale="mask")))
    straggler, other = await core.admit(9, 0.0)
    await put(core, group, other, newest=0)
    await train(core, 0, 1)
    for step in (1, 2):
        (ticket,) = await core.admit(1, 0.0)
        await put(core, group, ticket, newest=step)
        await train(core, step, 1)
    await core.put_group(straggler.issue, group(0, newest=2), 0.0)
    assert await train(core, 3, 1) == [straggler.issue]
    stats = await core.stats()
    assert stats["stale"] == {"dropped": 0, "masked": 1, "surplus": 0}
    assert stats["age"]["histogram"] == {"0": 3, "1": 1}
    assert stats["age"]["violations"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"newest_versions": None}, "'newest_versions' is missing"), ({"newest_versions": [0, 0]}, "'newest_versions' must hold")],
)
async def test_masking_needs_to_know_the_newest_versions(change, message, ready, group):
    core = await ready(Core(QueueLimits(1, 0, 9, on_stale="mask")))
    (ticket,) = await core.admit(1, 0.0)
    columns = {name: column for name, column in (group(0) | change).items() if column is not None}
    with pytest.raises(BusError, match=message):
        await core.put_group(ticket.issue, columns, 0.0)


# -- surplus --------------------------------------------------------------------------------------------------------------


async def test_extra_groups_fill_in_for_filtered_ones(ready, group):
    """Bound 0, two places, one extra: when one of three is filtered the step is complete all the same."""
    core = await ready(Core(QueueLimits(2, 0, 3, num_extra=1, in_order=True)))
    first, second, third = await core.admit(9, 0.0)
    assert [ticket.batch for ticket in (first, second, third)] == [0, 0, 0]
    await put(core, group, first, third)
    await core.forfeit(second.issue, "filtered", "no signal")
    assert await train(core, 0, 2) == [0, 2]
    assert (await core.stats())["stale"]["surplus"] == 0


async def test_surplus_within_the_bound_is_kept_and_other_surplus_issued_again(ready, group, tmp_path):
    core = await ready(Core(QueueLimits(2, 0, 3, num_extra=1, in_order=True), ledger=Ledger(tmp_path / "ledger")))
    await put(core, group, *await core.admit(9, 0.0))
    await train(core, 0, 2)
    tickets = await core.admit(9, 0.0)
    assert [(ticket.issue, ticket.prompt) for ticket in tickets] == [(3, 2), (4, 3), (5, 4)]
    await core.close()
    assert fates(tmp_path / "ledger")[2] == (
        2,
        "dropped",
        "surplus: version 0 would be 1 updates old at step 1, the bound is 0",
    )

    core = await ready(Core(QueueLimits(2, 1, 3, num_extra=1, in_order=True)))
    await put(core, group, *await core.admit(9, 0.0))
    await train(core, 0, 2)
    assert await train(core, 1, 2) == [2, 3]  # kept
    assert (await core.stats())["stale"]["surplus"] == 1  # issue 4, of version 0


async def test_nothing_is_left_when_the_last_step_is_trained(ready, group):
    """Queued, in flight or to be given again: it is surplus, and a ticket of it is void."""
    core = await ready(Core(QueueLimits(1, 0, 1, num_extra=3, in_order=True)))
    tickets = await core.admit(9, 0.0)
    assert len(tickets) == 4
    await put(core, group, tickets[0], tickets[1])
    core.give_again([3])
    await train(core, 0, 1)
    stats = await core.stats()
    assert stats["ledger"] == {"issued": 4, "in_flight": 0, "trained": 1, "filtered": 0, "failed": 0, "dropped": 3}
    assert stats["stale"]["surplus"] == 3
    assert await core.admit(1, 0.0) == []
    with pytest.raises(StaleHandle, match="is settled"):
        await put(core, group, tickets[2])


async def test_in_order_a_step_waits_for_the_first_issues(ready, group):
    """However many later ones are ready, and whatever it was that kept the first."""
    core = await ready(Core(QueueLimits(2, 2, 9, in_order=True)))
    tickets = await core.admit(9, 0.0)
    await put(core, group, *tickets[2:], tickets[0])
    assert set((await claim(core, 0, 2)).group_ids) == {0}
    for _ in range(2):
        with pytest.raises(WaitTimeout, match="4 groups ready, but groups are given in order"):
            await claim(core, 0)
        with pytest.raises(WaitTimeout):  # not for a later step either
            await claim(core, 1)
        core.give_again([1])
    (again,) = await core.admit(1, 0.0)
    assert again.issue == 1
    await core.forfeit(1, "failed", "engine lost")
    assert set((await claim(core, 0)).group_ids) == {2}
    assert set((await claim(core, 1, 2)).group_ids) == {3, 4}


async def test_in_order_what_is_given_back_goes_first_again(ready, group):
    core = await ready(Core(QueueLimits(2, 1, 9, in_order=True)))
    await put(core, group, *await core.admit(9, 0.0))
    lease = await claim(core, 0)
    await claim(core, 0)
    await core.release(lease.lease_id)
    assert set((await claim(core, 0)).group_ids) == {0}


# -- by hand --------------------------------------------------------------------------------------------------------------


async def test_a_dropped_prompt_is_issued_again_if_that_is_wanted(ready, group):
    """In the order of the data, before fresh ones, under new numbers; issues that are given again go before both."""
    core = await ready(Core(QueueLimits(4, 0, 9)))
    tickets = await core.admit(9, 0.0)
    await put(core, group, *tickets[:3])
    rows = [core.rows.groups[issue].row_ids for issue in range(3)]
    await core.drop([*rows[2], *rows[0]], "poison", reissue=True)
    await core.drop(rows[1][:1], "poison", reissue=True)  # a row is left
    core.give_again([3])
    again = await core.admit(9, 0.0)
    assert [(ticket.issue, ticket.prompt) for ticket in again] == [(3, 3), (4, 0), (5, 2)]
    await core.drop(rows[1][1:], "poison")
    (fresh,) = await core.admit(9, 0.0)
    assert (fresh.issue, fresh.prompt) == (6, 4)


# -- limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_staleness": 0, "updates_per_step": 2}, "max_staleness must be 1 or more with 2 updates a step"),
        ({"on_stale": "hope"}, "on_stale must be one of wait, drop, mask"),
        ({"num_extra": 1}, "num_extra needs in_order"),
        ({"num_extra": -1}, "num_extra must not be below 0"),
        ({"prompts_per_step": 0}, "prompts_per_step must be above 0"),
        ({"on_stale": "drop", "final_tasks": ("actor", "critic")}, "a single final task"),
        ({"final_tasks": ()}, "final_tasks must name a task"),
    ],
)
def test_limits_that_cannot_be_used_are_refused_by_name(limits, message):
    with pytest.raises(BusError, match=message):
        Core(QueueLimits(**({"prompts_per_step": 2, "max_staleness": 1, "num_steps": 3} | limits)))


async def test_counts_that_do_not_add_up_end_the_run(ready, group, tmp_path):
    """They cannot; if they did, the acknowledgement and the end would say so."""
    ledger = Ledger(tmp_path / "ledger")
    core = await ready(Core(QueueLimits(1, 1, 3), ledger=ledger))
    await put(core, group, *await core.admit(2, 0.0))
    core.tickets.fates["failed"] += 1
    with pytest.raises(BusError, match=r"a fault of the transfer queue: issued is not .* Counts: .*'failed': 1"):
        await train(core, 0, 1)
    with pytest.raises(BusError, match=r"the ledger has .* the queue .*'failed': 1"):
        await core.close()
