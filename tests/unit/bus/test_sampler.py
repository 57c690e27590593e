"""Shards for ranks, and the cost of a claim."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.bus.core import Core
from relax.bus.groups import Group
from relax.bus.sampler import shards
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, WaitTimeout
from relax.types import Ragged


def made(count):
    return [Group(i, 0, 0, (10 * i, 10 * i + 1), 2, {}, 0) for i in range(count)]


def split(costs, num_ranks, groups=None):
    return shards(groups or made(len(costs)), num_ranks, lambda group: costs[group.issue])


def loads_of(shards_, costs):
    return [sum(costs[g.issue] for g in shard) for shard in shards_]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_shards_are_a_balanced_partition(costs, num_ranks):
    """Every group in exactly one shard, counts within one, row-id order, and no rank further above another than one group."""
    groups = made(len(costs))
    found = split(costs, num_ranks)
    assert sorted(g.issue for shard in found for g in shard) == list(range(len(costs)))
    counts = [len(shard) for shard in found]
    assert max(counts) - min(counts) <= 1
    assert all([g.issue for g in shard] == sorted(g.issue for g in shard) for shard in found)
    if len(groups) % num_ranks == 0:
        loads = loads_of(found, costs)
        assert max(loads) - min(loads) <= max(costs) * max(1, len(groups) // num_ranks - 1) + 1e-6
    assert [[g.issue for g in shard] for shard in split(costs, num_ranks, groups[::-1])] == [
        [g.issue for g in shard] for shard in found
    ]


def test_long_groups_are_spread():
    costs = [100, 1, 100, 1, 50, 50, 1, 1]
    assert loads_of(split(costs, 2), costs) == [152, 152]


def test_groups_with_media_are_spread_by_what_they_cost():
    """A few images among texts that are as long: by cost the dearest rank is hardly above the mean, by length it is."""
    rng, above = np.random.default_rng(0), {"length": [], "cost": []}
    for _ in range(50):
        lengths = rng.integers(200, 2000, 32)
        costs = lengths + np.where(rng.random(32) < 0.3, rng.integers(500, 8000, 32), 0)
        for name, by in (("length", lengths), ("cost", costs)):
            loads = loads_of(split(by, 4), costs)
            above[name].append(max(loads) / np.mean(loads) - 1)
    assert np.mean(above["cost"]) < 0.02 < 0.2 < np.mean(above["length"])


async def test_the_queue_counts_a_prompt_and_its_media_once(ready):
    """2 rows of a prompt of 5 tokens, with 3 and 1 of their own, of which the last predict nothing; 8 rows of features."""
    core = await ready(Core(QueueLimits(1, 0, 3, row_costs={"pixels": 0.5})))
    (ticket,) = await core.admit(1, 0.0)
    rows = [[7, 7, 7, 7, 7, 1, 2, 3], [7, 7, 7, 7, 7, 4]]
    columns = {
        "tokens": Ragged.pack([np.asarray(row, np.int32) for row in rows]),
        "loss_mask": Ragged.pack([(np.arange(len(row)) >= 5).astype(np.uint8) for row in rows]),
        "versions": np.zeros(2, np.int64),
    }
    await core.put_group(ticket.issue, columns, 0.0, {"pixels": np.zeros((8, 3), np.float32), "grid": np.zeros((1, 3))})
    assert core.rows.cost(core.rows.groups[ticket.issue]) == 5 + 2 + 0 + 4


async def filled(ready, group, num_groups: int, lengths=None, **limits) -> Core:
    core = await ready(Core(QueueLimits(**({"prompts_per_step": num_groups, "max_staleness": 0, "num_steps": 3} | limits))))
    for index, ticket in enumerate(await core.admit(num_groups, 0.0)):
        await core.put_group(ticket.issue, group(0, length=lengths[index] if lengths else 3), 0.0)
    return core


async def claim(core, rank, num_ranks=2, step: int | None = 0, num_groups=2):
    return await core.claim("actor", ("tokens",), num_groups=num_groups, wait_s=0.0, step=step, rank=rank, num_ranks=num_ranks)


async def test_a_rank_may_run_ahead_of_another(ready, group):
    """The shards of one claim are planned when the first rank asks: who asks when makes no difference to what anybody gets."""
    lengths = [9, 1, 5, 5, 7, 3, 2, 8]
    alternating = await filled(ready, group, 8, lengths)
    expected = {rank: [] for rank in range(2)}
    for _ in range(2):
        for rank in range(2):
            expected[rank].append((await claim(alternating, rank)).group_ids)
    ahead = await filled(ready, group, 8, lengths)
    found = {1: [(await claim(ahead, 1)).group_ids for _ in range(2)]}
    found[0] = [(await claim(ahead, 0)).group_ids for _ in range(2)]
    assert found == expected
    assert len({issue for shards_ in found.values() for shard in shards_ for issue in shard}) == 8


async def test_ranks_acknowledge_a_step_together(ready, group):
    core = await filled(ready, group, 4)
    leases = [await claim(core, rank) for rank in (1, 0)]
    with pytest.raises(BusError, match="2 of its 4 groups"):
        await core.ack([leases[0].lease_id], step=0)
    await core.ack([lease.lease_id for lease in leases], step=0)
    assert (await core.stats())["ledger"]["trained"] == 4


async def test_a_claim_for_ranks_waits_until_each_can_have_a_group(ready, group):
    core = await ready(Core(QueueLimits(4, 0, 3)))
    tickets = await core.admit(4, 0.0)
    await core.put_group(tickets[0].issue, group(0), 0.0)
    with pytest.raises(WaitTimeout, match="1 group ready, not enough yet for 2 ranks"):
        await claim(core, 0)
    for ticket in tickets[1:3]:
        await core.put_group(ticket.issue, group(0), 0.0)
    assert [len(set((await claim(core, rank)).group_ids)) for rank in (0, 1)] == [1, 1]
    await core.put_group(tickets[3].issue, group(0), 0.0)
    assert sorted([len(set((await claim(core, rank)).group_ids)) for rank in (0, 1)]) == [1, 1]


async def test_the_rest_of_a_step_may_leave_a_rank_with_an_empty_shard(ready, group):
    core = await filled(ready, group, 3)
    counts = [[len(set((await claim(core, rank, num_groups=1)).group_ids)) for rank in (0, 1)] for _ in range(2)]
    assert counts == [[1, 1], [1, 0]]
    empty = core.leases.all()[-1]
    assert empty.row_ids == ()


async def test_a_shard_of_a_rank_that_never_comes_returns(ready, group, clock):
    core = Core(QueueLimits(4, 0, 3, lease_s=5.0), clock=clock)
    await ready(core)
    for ticket in await core.admit(4, 0.0):
        await core.put_group(ticket.issue, group(0), 0.0)
    await claim(core, 0)
    clock.time_s = 5.0
    both = [await claim(core, rank) for rank in (0, 1)]
    assert sorted({issue for lease in both for issue in lease.group_ids}) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("more", "message"),
    [({"rank": 2, "num_ranks": 2}, "rank 2 is not among 2"), ({"num_groups": 0}, "num_groups = 0"), ({"step": -1}, "step -1")],
)
async def test_impossible_claims_are_refused(more, message):
    with pytest.raises(BusError, match=message):
        await Core(QueueLimits(4, 0, 3)).claim("actor", ("tokens",), **({"num_groups": 1, "wait_s": 0.0} | more))


async def operations_per_claim(ready, group, num_groups: int) -> float:
    core = await ready(Core(QueueLimits(num_groups, 0, 1)))
    tickets = await core.admit(num_groups, 0.0)
    rows = group(0, num_rows=4)
    for task in ("actor", "critic"):
        with pytest.raises(WaitTimeout):
            await core.claim(task, ("tokens", "score"), num_groups=1, wait_s=0.0, step=0)
    indexes = [index for task in core.claims.tasks.values() for index in task.indexes.values()]
    for ticket in tickets:
        await core.put_group(ticket.issue, rows, 0.0)
    before = sum(index.operations for index in indexes)
    num_claims = num_groups // 10
    for _ in range(num_claims):
        lease = await core.claim("reference", ("tokens",), num_groups=1, wait_s=0.0)
        await core.write(lease.row_ids, {"score": np.zeros(4)})
        await core.claim("actor", ("tokens", "score"), num_groups=1, wait_s=0.0, step=0)
    return (sum(index.operations for index in indexes) - before) / num_claims


async def test_the_cost_of_a_claim_does_not_grow_with_the_queue(ready, group):
    """Heap entries touched per write and claim: the same for 10,000 rows in flight as for 100."""
    few = await operations_per_claim(ready, group, 25)
    many = await operations_per_claim(ready, group, 2500)
    assert many <= few <= 4
