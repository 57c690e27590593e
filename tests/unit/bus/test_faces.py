"""What every user of the queue relies on, in process and over the socket alike."""

import asyncio

import numpy as np
import pytest

from relax.errors import BusError, StaleHandle, WaitTimeout
from relax.types import Ragged


@pytest.fixture
def fill(group):
    async def fill(queue, count: int, version: int = 0, **more) -> list[int]:
        """Puts `count` groups; returns their issue numbers."""
        tickets = []
        while len(tickets) < count:
            tickets += await queue.admit(count - len(tickets), 1.0)
        for ticket in tickets:
            await queue.put_group(ticket.issue, group(version, **more), 1.0)
        return [ticket.issue for ticket in tickets]

    return fill


async def test_what_is_put_is_what_is_claimed(queue, ready, group):
    """Values, dtypes, lengths and order of all three kinds of column survive the way through the queue."""
    await ready(queue)
    big = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32)
    outcome = ["ok", {"why": None, "parts": [1, 2.5]}]
    experts = Ragged(np.arange(7 * 6, dtype=np.uint8).reshape(7, 2, 3), np.array([0, 3, 7]))
    (ticket,) = await queue.admit(1, 1.0)
    columns = group(0, outcome=outcome, big=big, experts=experts, flags=np.array([True, False]))
    ids = await queue.put_group(ticket.issue, columns, 1.0)
    lease = await queue.claim("actor", [*columns], num_groups=4, wait_s=1.0)
    assert lease.row_ids == tuple(ids)
    assert lease.group_ids == (ticket.issue, ticket.issue)
    assert lease.columns["outcome"] == outcome
    for name in ("big", "versions", "flags"):
        np.testing.assert_array_equal(lease.columns[name], columns[name], strict=True)
    for name in ("tokens", "experts"):
        np.testing.assert_array_equal(lease.columns[name].values, columns[name].values, strict=True)
        np.testing.assert_array_equal(lease.columns[name].offsets, columns[name].offsets, strict=True)


async def test_a_claim_belongs_to_its_consumer(queue, ready, fill):
    """A consumer may change what it got, also after the acknowledgement, and nobody else sees it."""
    await ready(queue)
    await fill(queue, 1, big=np.ones((2, 50_000), np.float32))
    first = await queue.claim("one", ("tokens", "big"), num_groups=1, wait_s=1.0)
    first.columns["big"][:] = 7
    first.columns["tokens"].values[:] = 7
    second = await queue.claim("two", ("tokens", "big"), num_groups=1, wait_s=1.0)
    assert np.all(second.columns["big"] == 1)
    assert second.columns["tokens"].values.max() < 7
    await queue.ack([first.lease_id])
    assert np.all(first.columns["big"] == 7)


async def test_a_producer_may_reuse_its_arrays(queue, ready, group):
    await ready(queue)
    (ticket,) = await queue.admit(1, 1.0)
    columns = group(0)
    await queue.put_group(ticket.issue, columns, 1.0)
    columns["tokens"].values[:] = 99
    lease = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)
    assert lease.columns["tokens"].values.max() < 99


async def test_each_task_gets_each_group_once(queue, ready, fill):
    await ready(queue)
    issues = await fill(queue, 4)
    for task in ("reference", "advantages"):
        first = await queue.claim(task, ("tokens",), num_groups=3, wait_s=1.0)
        second = await queue.claim(task, ("tokens",), num_groups=3, wait_s=1.0)
        assert sorted({*first.group_ids, *second.group_ids}) == issues
        assert not set(first.row_ids) & set(second.row_ids)
        with pytest.raises(WaitTimeout):
            await queue.claim(task, ("tokens",), num_groups=3, wait_s=0.0)


async def test_a_column_is_written_once(queue, ready, fill):
    """The same bytes again are ignored, NaN included; other bytes are refused, and what was there stays."""
    await ready(queue)
    await fill(queue, 1)
    lease = await queue.claim("advantages", ("tokens",), num_groups=1, wait_s=1.0)
    values = Ragged(np.array([0, np.nan, 2, 3, 4, 5, 6], np.float32), np.array([0, 3, 7]))
    await queue.write(lease.row_ids, {"advantages": values})
    await queue.write(lease.row_ids, {"advantages": values})
    with pytest.raises(BusError, match="written once"):
        await queue.write(lease.row_ids, {"advantages": Ragged(values.values + 1, values.offsets)})
    claimed = await queue.claim("actor", ("advantages",), num_groups=1, wait_s=1.0)
    np.testing.assert_array_equal(claimed.columns["advantages"].values, values.values)


async def test_a_group_is_ready_when_all_its_rows_have_the_column(queue, ready, fill):
    await ready(queue)
    await fill(queue, 1)
    lease = await queue.claim("critic", ("tokens",), num_groups=1, wait_s=1.0)
    await queue.write(lease.row_ids[1:], {"score": np.array([2.0])})
    with pytest.raises(WaitTimeout, match="1 group waits for column score: issue 0"):
        await queue.claim("actor", ("score",), num_groups=1, wait_s=0.0)
    await queue.write(lease.row_ids[:1], {"score": np.array([1.0])})
    got = await queue.claim("actor", ("score",), num_groups=1, wait_s=1.0)
    assert got.columns["score"].tolist() == [1.0, 2.0]


async def test_putting_an_issue_again_returns_the_first_ids(queue, ready, group):
    """Also after the rows are trained and gone: a producer that lost the answer may always try again."""
    await ready(queue)
    (ticket,) = await queue.admit(1, 1.0)
    ids = await queue.put_group(ticket.issue, group(0), 1.0)
    assert await queue.put_group(ticket.issue, group(0), 1.0) == ids
    lease = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)
    await queue.ack([lease.lease_id])
    assert await queue.put_group(ticket.issue, group(0), 1.0) == ids
    assert (await queue.stats())["ledger"]["issued"] == 1


async def test_a_waiting_claim_wakes_when_its_rows_come(queue, ready, fill):
    await ready(queue)
    waiting = asyncio.create_task(queue.claim("actor", ("tokens",), num_groups=1, wait_s=5.0, consumer="actor-0"))
    await asyncio.sleep(0.05)
    waits = (await queue.stats())["waits"]
    assert [(w["who"], w["call"]) for w in waits] == [("actor-0", "claim of actor")]
    assert "not admitted" in waits[0]["reason"]
    await fill(queue, 1)
    assert len((await waiting).row_ids) == 2
    assert (await queue.stats())["waits"] == []
    assert (await queue.stats())["waited_s"]["actor"] > 0


async def test_a_claim_may_ask_for_so_many_at_least(queue, ready, fill):
    """It gets nothing before there are as many, and more when there are more; more than the step's places cannot be."""
    await ready(queue)
    await fill(queue, 2)
    waiting = asyncio.create_task(queue.claim("actor", ("tokens",), num_groups=4, at_least=3, wait_s=5.0, step=0))
    await asyncio.sleep(0.02)
    assert "2 groups ready of the 3 that are wanted at least" in (await queue.stats())["waits"][0]["reason"]
    await fill(queue, 1)
    assert len(set((await waiting).group_ids)) == 3
    with pytest.raises(BusError, match="at_least = 2, but step 0 has 1 places left"):
        await queue.claim("actor", ("tokens",), num_groups=2, at_least=2, wait_s=0.0, step=0)
    with pytest.raises(BusError, match="at_least = 3 must be from 1 to num_groups = 2"):
        await queue.claim("actor", ("tokens",), num_groups=2, at_least=3, wait_s=0.0)
    await fill(queue, 1)
    assert len(set((await queue.claim("critic", ("tokens",), num_groups=9, at_least=4, wait_s=0.0)).group_ids)) == 4


async def test_a_ticket_names_its_prompt(queue, ready):
    """Prompts are counted apart from issues: a filtered group uses its prompt up."""
    await ready(queue)
    tickets = await queue.admit(3, 1.0)
    assert [(ticket.issue, ticket.prompt) for ticket in tickets] == [(0, 0), (1, 1), (2, 2)]
    await queue.forfeit(1, "filtered", "no signal")
    assert [(ticket.issue, ticket.prompt) for ticket in await queue.admit(1, 1.0)] == [(3, 3)]


async def test_a_cancelled_claim_takes_nothing(queue, ready, fill):
    await ready(queue)
    waiting = asyncio.create_task(queue.claim("actor", ("tokens",), num_groups=1, wait_s=5.0))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await fill(queue, 1)
    assert len((await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)).row_ids) == 2


async def test_a_wait_names_the_issues_that_are_missing(queue, ready, group):
    await ready(queue)
    tickets = await queue.admit(8, 1.0)
    await queue.put_group(tickets[1].issue, group(0), 1.0)
    await queue.claim("actor", ("tokens",), num_groups=1, wait_s=0.0, step=0)
    with pytest.raises(WaitTimeout) as caught:
        await queue.claim("actor", ("tokens",), num_groups=1, wait_s=0.05, step=0)
    assert caught.value.what == "claim of actor for step 0"
    assert caught.value.reason.startswith("3 groups of step 0 are still being generated: issues 0, 2, 3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "'tokens' is missing"),
        ({"versions": None}, "'versions' is missing"),
        ({"reward": np.zeros(3)}, "disagree about the number of rows"),
        ({"loss_mask": Ragged.pack([np.zeros(3, np.uint8)] * 2)}, "row 1 of column 'loss_mask' has 3 entries for 4 tokens"),
        ({"extra": [object(), 1]}, "column 'extra'.*JSON"),
        ({"extra": np.array(["a", "b"])}, "column 'extra'.*dtype <U1 cannot travel"),
        ({"extra": Ragged(np.zeros(3), np.array([0, 2, 1]))}, "column 'extra'.*must rise from 0 to 3"),
        ({"extra": {1: 2}}, "column 'extra'.*dict is not a column"),
    ],
)
async def test_what_is_malformed_is_refused_by_name(queue, change, message, ready, group):
    """The error names the column, and the ticket can still be used."""
    await ready(queue)
    (ticket,) = await queue.admit(1, 1.0)
    columns = {name: column for name, column in (group(0) | change).items() if column is not None}
    with pytest.raises(BusError, match=message):
        await queue.put_group(ticket.issue, columns, 1.0)
    assert await queue.put_group(ticket.issue, group(0), 1.0)


async def test_a_column_keeps_its_dtype(queue, ready, group):
    await ready(queue)
    first, second = await queue.admit(2, 1.0)
    await queue.put_group(first.issue, group(0, reward=np.zeros(2, np.float32)), 1.0)
    with pytest.raises(BusError, match="'reward' is dense float64, but it was dense float32 before"):
        await queue.put_group(second.issue, group(0, reward=np.zeros(2)), 1.0)


async def test_a_group_older_than_its_ticket_is_refused(queue, ready, group):
    await ready(queue, version=1)
    (ticket,) = await queue.admit(1, 1.0)
    with pytest.raises(BusError, match="says 0, but every engine held version 1"):
        await queue.put_group(ticket.issue, group(0), 1.0)


async def test_handles_of_another_life_are_refused(queue, ready, fill):
    await ready(queue)
    (issue,) = await fill(queue, 1)
    lease = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)
    with pytest.raises(StaleHandle, match="earlier life"):
        await queue.write([lease.row_ids[0] ^ (1 << 45), lease.row_ids[1]], {"x": np.zeros(2)})
    with pytest.raises(StaleHandle, match="earlier life"):
        await queue.ack(["zzzzzz-actor-1"])
    with pytest.raises(StaleHandle, match="already has rows"):
        await queue.forfeit(issue, "failed", "late")
    await queue.ack([lease.lease_id])
    with pytest.raises(StaleHandle, match="is acknowledged already"):
        await queue.ack([lease.lease_id])
    with pytest.raises(StaleHandle, match="is gone"):
        await queue.write(lease.row_ids, {"x": np.zeros(2)})


async def test_a_released_lease_comes_back(queue, ready, fill):
    await ready(queue)
    await fill(queue, 1)
    first = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)
    await queue.release(first.lease_id)
    again = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)
    assert again.row_ids == first.row_ids
    with pytest.raises(StaleHandle, match="was released"):
        await queue.ack([first.lease_id])


async def test_dropped_rows_are_counted_and_their_place_goes_to_another_prompt(queue, ready, fill):
    await ready(queue)
    await fill(queue, 8)
    with pytest.raises(WaitTimeout):
        await queue.admit(1, 0.0)
    lease = await queue.claim("actor", ("tokens",), num_groups=1, wait_s=1.0)
    await queue.drop(lease.row_ids[:1], "too long")
    with pytest.raises(WaitTimeout):
        await queue.admit(1, 0.0)  # a row is left
    await queue.drop(lease.row_ids[1:], "too long")
    assert [ticket.issue for ticket in await queue.admit(9, 1.0)] == [8]
    counts = (await queue.stats())["ledger"]
    assert counts == {"issued": 9, "in_flight": 8, "trained": 0, "filtered": 0, "failed": 0, "dropped": 1}
    await queue.ack([lease.lease_id])  # nothing is left of it, which is no error


async def test_what_is_left_of_a_group_is_whole(queue, ready, fill):
    """Dropping a row shortens every column, and completes those that only this row was missing."""
    await ready(queue)
    await fill(queue, 1, num_rows=3)
    lease = await queue.claim("critic", ("tokens",), num_groups=1, wait_s=1.0)
    await queue.write([lease.row_ids[0], lease.row_ids[2]], {"score": np.array([1.0, 3.0])})
    await queue.drop([lease.row_ids[1]], "poison")
    got = await queue.claim("actor", ("tokens", "score"), num_groups=1, wait_s=1.0)
    assert got.row_ids == (lease.row_ids[0], lease.row_ids[2])
    assert got.columns["score"].tolist() == [1.0, 3.0]
    assert [len(got.columns["tokens"][row]) for row in range(2)] == [3, 5]


async def test_rows_of_several_groups_are_dropped_and_written_in_any_order(queue, ready, fill):
    await ready(queue)
    await fill(queue, 2, num_rows=3)
    rows = (await queue.claim("critic", ("tokens",), num_groups=2, wait_s=1.0)).row_ids
    await queue.drop([rows[0], rows[3], rows[1]], "poison")
    left = [rows[5], rows[2], rows[4]]
    await queue.write(left, {"score": np.array([5.0, 2.0, 4.0])})
    got = await queue.claim("actor", ("score",), num_groups=2, wait_s=1.0)
    assert got.row_ids == (rows[2], rows[4], rows[5])
    assert got.columns["score"].tolist() == [2.0, 4.0, 5.0]
    with pytest.raises(BusError, match="named twice"):
        await queue.drop([rows[2], rows[2]], "poison")


async def test_events_are_numbered_and_wait(queue):
    waiting = asyncio.create_task(queue.events(0, 5.0))
    await asyncio.sleep(0.02)
    await queue.emit({"kind": "step", "step": 3})
    assert await waiting == [{"kind": "step", "step": 3, "seq": 1}]
    assert await queue.events(0, 0.01) == [{"kind": "step", "step": 3, "seq": 1}], "not yet read"
    assert await queue.events(1, 0.01) == []
    assert await queue.events(0, 0.01) == [], "what was read is forgotten"
    with pytest.raises(BusError, match="kind"):
        await queue.emit({"step": 3})


async def test_manifests_reach_every_receiver_and_count_once_acknowledged(queue, manifest):
    await queue.subscribe("a")
    await queue.subscribe("b")
    waiting = asyncio.create_task(queue.next_manifest("a", 5.0))
    await asyncio.sleep(0.02)
    await queue.announce(manifest(0))
    assert await waiting == manifest(0)
    assert await queue.next_manifest("b", 1.0) == manifest(0)
    await queue.acknowledge("a", 0)
    with pytest.raises(WaitTimeout, match="b to acknowledge a first policy version"):
        await queue.admit(1, 0.0)
    await queue.reject("b", 0, "digest differs")
    with pytest.raises(WaitTimeout, match="b holds no version and rejected version 0: digest differs"):
        await queue.wait_acknowledged(0, 0.0)
    assert await queue.next_manifest("b", 1.0) == manifest(0)  # offered again
    await queue.acknowledge("b", 0)
    await queue.wait_acknowledged(0, 0.0)
    stats = (await queue.stats())["versions"]
    assert stats["acknowledged"] == {"a": 0, "b": 0}
    assert stats["publications"] == {"announced": 1, "acknowledged": 2, "rejected": 1}
    with pytest.raises(WaitTimeout, match="another policy version than 0"):
        await queue.next_manifest("a", 0.0)
    await queue.announce(manifest(2))
    with pytest.raises(BusError, match="versions only rise"):
        await queue.announce(manifest(1))
    with pytest.raises(BusError, match="'c' has not subscribed"):
        await queue.acknowledge("c", 2)


async def test_only_the_slowest_receiver_counts(queue, ready):
    await ready(queue)
    await queue.admit(8, 1.0)
    await queue.acknowledge("engine", 1)
    await queue.subscribe("newcomer")
    with pytest.raises(WaitTimeout, match="newcomer"):
        await queue.admit(1, 0.0)
    await queue.acknowledge("newcomer", 0)
    with pytest.raises(WaitTimeout, match="newcomer holds version 0"):
        await queue.admit(1, 0.0)
    await queue.unsubscribe("newcomer")
    assert [t.version for t in await queue.admit(1, 1.0)] == [1]


async def test_a_whole_run(queue, ready, group):
    """Three steps of four groups at bound 1 with a filtered and a failed group: everything is accounted for, then it ends."""
    await ready(queue)
    await queue.emit({"kind": "begin"})
    batches = []

    async def produce() -> None:
        count = 0
        while tickets := await queue.admit(3, 5.0):
            for ticket in tickets:
                count += 1
                if count in (2, 5):
                    await queue.forfeit(ticket.issue, "filtered" if count == 2 else "failed", "for the test")
                else:
                    batches.append(ticket.batch)
                    await queue.put_group(ticket.issue, group(ticket.version, num_rows=count % 3 + 1), 5.0)

    producer = asyncio.create_task(produce())
    for step in range(3):
        leases = []
        while sum(len(set(lease.group_ids)) for lease in leases) < 4:
            leases.append(await queue.claim("actor", ("tokens", "versions"), num_groups=2, wait_s=5.0, step=step))
        assert all(step - int(version) <= 1 for lease in leases for version in lease.columns["versions"])
        await queue.ack([lease.lease_id for lease in leases], step=step)
        await queue.acknowledge("engine", step + 1)
    await producer
    assert len(batches) == 12
    assert batches == sorted(batches)
    assert batches[-1] == 2
    stats = await queue.stats()
    assert stats["ledger"] == {"issued": 14, "in_flight": 0, "trained": 12, "filtered": 1, "failed": 1, "dropped": 0}
    assert stats["is_finished"]
    assert stats["bytes"]["held"] == 0
    assert stats["age"]["max"] == 1
    assert await queue.admit(1, 0.0) == []
