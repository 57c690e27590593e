"""Random lives of a queue against a model of it: exactly once, conservation, age, places; with a fake clock."""

import asyncio
import contextlib
import os
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax.bus.core import Core
from relax.bus.transfer_queue import Lease, QueueLimits, Ticket
from relax.errors import StaleHandle, WaitTimeout
from relax.types import Ragged


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class QueueMachine(RuleBasedStateMachine):
    """One producer with tickets, a critic that writes a column, a trainer that claims by step; all calls at wait_s = 0."""

    @initialize(prompts=st.integers(1, 4), bound=st.integers(0, 3), steps=st.integers(1, 6))
    def begin(self, prompts: int, bound: int, steps: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.limits = QueueLimits(prompts, bound, steps, lease_s=10.0)
        self.core = Core(self.limits, clock=self.clock)
        self.tickets: dict[int, Ticket] = {}
        self.put: dict[int, tuple[int, list[int]]] = {}  # issue -> (oldest version, row ids)
        self.leases: dict[str, Lease] = {}
        self.had: dict[str, Counter[int]] = defaultdict(Counter)  # task -> rows acknowledged
        self.fates: Counter[str] = Counter()
        self.step, self.version = 0, 0
        self.call(self.core.subscribe("engine"))
        self.call(self.core.acknowledge("engine", 0))

    def call(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    @rule(count=st.integers(1, 9))
    def admit(self, count: int) -> None:
        with contextlib.suppress(WaitTimeout):
            for ticket in self.call(self.core.admit(count, 0.0)):
                assert ticket.issue not in self.tickets
                assert ticket.issue not in self.put
                assert ticket.batch - self.version <= self.limits.max_staleness
                assert ticket.batch < self.limits.num_steps
                self.tickets[ticket.issue] = ticket

    @precondition(lambda self: getattr(self, "tickets", None))
    @rule(data=st.data(), newer=st.integers(0, 2), num_rows=st.integers(1, 3))
    def put_group(self, data: st.DataObject, newer: int, num_rows: int) -> None:
        issue = data.draw(st.sampled_from(sorted(self.tickets)))
        oldest = min(self.tickets.pop(issue).version + newer, self.version)
        columns = {
            "tokens": Ragged.pack([np.full(2 + row, issue, np.int32) for row in range(num_rows)]),
            "versions": np.full(num_rows, oldest, np.int64),
        }
        ids = self.call(self.core.put_group(issue, columns, 0.0))
        assert self.call(self.core.put_group(issue, columns, 0.0)) == ids
        assert not {row for _, rows in self.put.values() for row in rows} & set(ids)
        self.put[issue] = (oldest, ids)

    @precondition(lambda self: getattr(self, "tickets", None))
    @rule(data=st.data(), outcome=st.sampled_from(["filtered", "failed"]))
    def forfeit(self, data: st.DataObject, outcome: str) -> None:
        issue = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[issue]
        self.call(self.core.forfeit(issue, outcome, "because"))
        self.fates[outcome] += 1

    @precondition(lambda self: getattr(self, "tickets", None))
    @rule(data=st.data())
    def producer_dies(self, data: st.DataObject) -> None:
        issue = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[issue]
        self.core.give_again([issue])

    @rule(num_groups=st.integers(1, 5))
    def claim_as_critic(self, num_groups: int) -> None:
        self.claim("critic", ("tokens",), num_groups, None)

    @rule(num_groups=st.integers(1, 5), ahead=st.sampled_from([0, 0, 0, 1]))
    def claim_as_actor(self, num_groups: int, ahead: int) -> None:
        step = self.step + ahead
        if step < self.limits.num_steps and self.num_taken(step) < self.limits.prompts_per_step:
            self.claim("actor", ("tokens", "values_of_critic"), num_groups, step)

    def num_taken(self, step: int) -> int:
        mine = [lease for lease in self.leases.values() if lease.task == "actor" and self.steps[lease.lease_id] == step]
        return sum(len(set(lease.group_ids)) for lease in mine)

    def claim(self, task: str, columns: tuple[str, ...], num_groups: int, step: int | None) -> None:
        self.steps = getattr(self, "steps", {})
        try:
            lease = self.call(self.core.claim(task, columns, num_groups=num_groups, wait_s=0.0, step=step))
        except WaitTimeout:
            return
        groups = set(lease.group_ids)
        assert 1 <= len(groups) <= num_groups
        assert list(lease.row_ids) == sorted(row for issue in groups for row in self.put[issue][1])  # whole, in order
        tokens = lease.columns["tokens"]
        assert [int(tokens[row][0]) for row in range(len(tokens))] == list(lease.group_ids)
        out = {row for other in self.leases.values() if other.task == task for row in other.row_ids}
        assert not out & set(lease.row_ids)
        assert not self.had[task].keys() & set(lease.row_ids)
        if step is not None:
            assert all(0 <= step - self.put[issue][0] <= self.limits.max_staleness for issue in groups)
            assert self.num_taken(step) + len(groups) <= self.limits.prompts_per_step
        self.leases[lease.lease_id] = lease
        self.steps[lease.lease_id] = step

    @precondition(lambda self: any(lease.task == "critic" for lease in getattr(self, "leases", {}).values()))
    @rule(writes_only=st.booleans())
    def critic_commits(self, writes_only: bool) -> None:
        lease = next(lease for lease in self.leases.values() if lease.task == "critic")
        values = np.array([row % 1000 for row in lease.row_ids], np.float32)
        self.call(self.core.write(lease.row_ids, {"values_of_critic": values}))
        if not writes_only:
            self.call(self.core.ack([lease.lease_id]))
            self.settled(lease)

    def settled(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]
        self.had[lease.task].update(lease.row_ids)

    @precondition(lambda self: hasattr(self, "leases") and self.num_taken(self.step) == self.limits.prompts_per_step)
    @rule(publish=st.booleans())
    def actor_commits(self, publish: bool) -> None:
        mine = [lease for lease in self.leases.values() if lease.task == "actor" and self.steps[lease.lease_id] == self.step]
        self.call(self.core.ack([lease.lease_id for lease in mine], step=self.step))
        for lease in mine:
            self.settled(lease)
            self.fates["trained"] += len(set(lease.group_ids))
        self.step += 1
        if publish:
            self.publish()

    @precondition(lambda self: hasattr(self, "core"))
    @rule()
    def everything_goes_well(self) -> None:
        """The critic finishes what there is and the trainer takes all it may: lives get old enough to meet the bound."""
        self.claim_as_critic(5)
        while any(lease.task == "critic" for lease in self.leases.values()):
            self.critic_commits(False)
        self.claim_as_actor(5, 0)
        if self.num_taken(self.step) == self.limits.prompts_per_step:
            self.actor_commits(True)

    @rule()
    def publish(self) -> None:
        self.version = self.step
        self.call(self.core.acknowledge("engine", self.version))

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.call(self.core.release(lease_id))
        del self.leases[lease_id]

    @precondition(lambda self: getattr(self, "leases", None))
    @rule()
    def everybody_is_late(self) -> None:
        self.clock.time_s += 10.0
        self.core.claims.expire()
        for lease in self.leases.values():
            with pytest.raises(StaleHandle, match="ran past"):
                self.call(self.core.ack([lease.lease_id], step=self.steps[lease.lease_id]))
        self.leases.clear()

    @precondition(lambda self: getattr(self, "put", None))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        live = sorted(set(self.core.rows.groups))
        if live:
            issue = data.draw(st.sampled_from(live))
            self.call(self.core.drop(self.core.rows.groups[issue].row_ids, "poison"))
            self.fates["dropped"] += 1
            for lease_id, lease in list(self.leases.items()):  # the lease lives on with what is left of it
                keep = [i for i, group in enumerate(lease.group_ids) if group != issue]
                rows, groups = tuple(lease.row_ids[i] for i in keep), tuple(lease.group_ids[i] for i in keep)
                if not rows:
                    self.call(self.core.release(lease_id))
                    del self.leases[lease_id]
                else:
                    self.leases[lease_id] = Lease(lease_id, lease.task, rows, groups, lease.columns, lease.deadline_s)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        counts = self.call(self.core.stats())["ledger"]
        fates = {name: counts[name] for name in ("trained", "filtered", "failed", "dropped")}
        assert fates == {name: self.fates[name] for name in fates}
        assert counts["issued"] == sum(fates.values()) + counts["in_flight"]
        assert self.core.claims.num_violations == 0
        places = self.core.claims.tasks["actor"].places if "actor" in self.core.claims.tasks else None
        if places is not None:
            assert all(places.slack(step) >= 0 for step in range(places.next_step, places.next_step + 5))
        assert all(age <= self.limits.max_staleness for age in self.core.claims.ages)


EXAMPLES = int(os.environ.get("RELAX_EXAMPLES", "60"))
QueueMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
test_random_lives = QueueMachine.TestCase
