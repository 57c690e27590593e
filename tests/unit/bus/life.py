"""A model of the queue that lives beside a real one: exactly once, conservation, age, order, turns; with a fake clock.

Every life has limits of its own and ends with a run to the last step: whatever happened before, it can be finished.
"""

import asyncio
import contextlib
import weakref
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from unit.bus.parts import FakeClock, assert_same_arrays, make_group, make_manifest, make_shared

from relax.bus.core import Core
from relax.bus.ledger import Ledger
from relax.bus.transfer_queue import Lease, QueueLimits, Ticket
from relax.errors import StaleHandle, WaitTimeout


@st.composite
def all_limits(draw: st.DrawFn) -> QueueLimits:
    """Every combination that is allowed."""
    updates = draw(st.integers(1, 2))
    in_order = draw(st.booleans())
    return QueueLimits(
        prompts_per_step=draw(st.integers(1, 4)),
        max_staleness=draw(st.integers(updates - 1, 3)),
        num_steps=draw(st.integers(1, 6)),
        lease_s=10.0,
        updates_per_step=updates,
        on_stale=draw(st.sampled_from(["wait", "drop", "mask"])),
        num_extra=draw(st.integers(0, 3)) if in_order else 0,
        in_order=in_order,
    )


PICK = st.integers(0, 999)  # which of those that there are


def one_of(choices, pick: int):
    """One of them, whichever number `pick` is."""
    return sorted(choices)[pick % len(choices)]


class QueueLife(RuleBasedStateMachine):
    """One producer with tickets, a critic that writes a column, a trainer that claims by step; all calls at wait_s = 0."""

    @initialize(limits=all_limits())
    def begin(self, limits: QueueLimits) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.limits = limits
        self.ledger = Ledger(":memory:")
        self.core = Core(limits, clock=self.clock, ledger=self.ledger)
        self.tickets: dict[int, Ticket] = {}
        self.put: dict[int, tuple[int, int]] = {}  # issue with rows in the queue -> (oldest version, newest version)
        self.media: dict[int, list[weakref.ref]] = {}  # issue -> its shared arrays, wherever they are
        self.rows: dict[int, list[int]] = {}  # all row ids of this life, by issue
        self.prompts: dict[int, int] = {}  # issue -> prompt, of all that were ever given
        self.leases: dict[str, Lease] = {}
        self.steps: dict[str, int | None] = {}
        self.had: dict[str, Counter[int]] = defaultdict(Counter)  # task -> rows acknowledged
        self.trained: list[list[int]] = []  # by step: issues
        self.fates: Counter[str] = Counter()
        self.restored_at = 0
        self.version = -1
        self.call(self.core.subscribe("engine", takes_turns=True))
        self.publish()

    def call(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    @property
    def step(self) -> int:
        return len(self.trained)

    # -- the producer -------------------------------------------------------------------------------------------------
    @rule(count=st.integers(1, 9))
    def admit(self, count: int) -> None:
        self.try_to_admit(count)

    def try_to_admit(self, count: int) -> int:
        waiting, fresh = sorted(self.core.tickets.numbers.waiting), self.core.tickets.numbers.next_prompt
        again = sorted(self.core.tickets.again)
        try:
            tickets = self.call(self.core.admit(count, 0.0))
        except WaitTimeout:
            return 0
        expected = [*again, *(None for _ in tickets)]
        for ticket, issue in zip(tickets, expected, strict=False):
            assert ticket.issue not in self.tickets
            assert ticket.issue not in self.put
            assert ticket.version == self.version
            age = (ticket.batch + 1) * self.limits.updates_per_step - 1 - ticket.version
            assert age <= self.limits.max_staleness
            assert ticket.batch < self.limits.num_steps
            if issue is not None:
                assert (ticket.issue, ticket.prompt) == (issue, self.prompts[issue])
            else:
                assert ticket.issue not in self.prompts, "issue numbers are never used twice"
                if waiting:
                    assert ticket.prompt == waiting.pop(0)
                else:
                    assert ticket.prompt == fresh
                    fresh += 1
            self.prompts[ticket.issue] = ticket.prompt
            self.tickets[ticket.issue] = ticket
        return len(tickets)

    @precondition(lambda self: getattr(self, "tickets", None))
    @rule(pick=PICK, newer=st.integers(0, 2), spread=st.integers(0, 2), num_rows=st.integers(1, 3), has_media=st.booleans())
    def put_group(self, pick: int, newer: int, spread: int, num_rows: int, has_media: bool = True) -> None:
        self.put_one(one_of(self.tickets, pick), newer, spread, num_rows, has_media=has_media)

    def put_one(self, issue: int, newer: int = 0, spread: int = 0, num_rows: int = 1, *, has_media: bool = False) -> None:
        oldest = min(self.tickets.pop(issue).version + newer, self.version)
        newest = min(oldest + spread, self.version)
        columns = make_group(oldest, num_rows, 2, newest=newest, which=np.full(num_rows, issue))
        shared = make_shared(issue) if has_media else None
        ids = self.call(self.core.put_group(issue, columns, 0.0, shared))
        assert self.call(self.core.put_group(issue, columns, 0.0, shared)) == ids
        if shared is not None:
            self.media[issue] = [weakref.ref(array) for array in shared.values()]
        assert not {row for rows in self.rows.values() for row in rows} & set(ids)
        self.rows[issue] = ids
        if issue in self.core.rows.groups:
            self.put[issue] = oldest, newest
        else:
            assert self.due(oldest, newest) < self.step

    def due(self, oldest: int, newest: int) -> int:
        """The last step that may train the group."""
        deciding = newest if self.limits.on_stale == "mask" else oldest
        return (deciding + self.limits.max_staleness + 1) // self.limits.updates_per_step - 1

    @precondition(lambda self: getattr(self, "tickets", None))
    @rule(pick=PICK, outcome=st.sampled_from(["filtered", "failed"]))
    def forfeit(self, pick: int, outcome: str) -> None:
        issue = one_of(self.tickets, pick)
        del self.tickets[issue]
        self.call(self.core.forfeit(issue, outcome, "because"))
        self.fates[outcome] += 1

    @precondition(lambda self: getattr(self, "tickets", None))
    @rule(pick=PICK)
    def producer_dies(self, pick: int) -> None:
        issue = one_of(self.tickets, pick)
        del self.tickets[issue]
        self.core.give_again([issue])

    # -- consumers ----------------------------------------------------------------------------------------------------
    @rule(num_groups=st.integers(1, 5))
    def claim_as_critic(self, num_groups: int) -> None:
        self.claim("critic", ("tokens",), num_groups, 1, None)

    @rule(num_groups=st.integers(1, 5), at_least=st.integers(1, 3), ahead=st.sampled_from([0, 0, 0, 1]))
    def claim_as_actor(self, num_groups: int, at_least: int = 1, ahead: int = 0) -> None:
        step = self.step + ahead
        if step < self.limits.num_steps and self.num_taken(step) < self.limits.prompts_per_step:
            at_least = min(at_least, num_groups, self.limits.prompts_per_step - self.num_taken(step))
            self.claim("actor", ("tokens", "values_of_critic"), num_groups, at_least, step)

    def num_taken(self, step: int) -> int:
        return sum(len(set(lease.group_ids)) for lease in self.of_step(step))

    def of_step(self, step: int) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.task == "actor" and self.steps[lease.lease_id] == step]

    def claim(self, task: str, columns: tuple[str, ...], num_groups: int, at_least: int, step: int | None) -> None:
        names, asks = [*columns, "which"], task == "actor"
        try:
            call = self.core.claim(task, names, num_groups=num_groups, at_least=at_least, wait_s=0.0, step=step, shared=asks)
            lease = self.call(call)
        except WaitTimeout:
            assert self.num_takeable(task, set(columns), step) < at_least, "it was held back without need"
            return
        groups = set(lease.group_ids)
        assert at_least <= len(groups) <= num_groups
        assert list(lease.row_ids) == sorted(row for issue in groups for row in self.rows[issue])  # whole, in order
        assert lease.columns["which"].tolist() == list(lease.group_ids)
        assert lease.shared.keys() == (groups & self.media.keys() if asks else set())
        for issue, arrays in lease.shared.items():
            assert_same_arrays(arrays, make_shared(issue))
            assert all(array is one() for array, one in zip(arrays.values(), self.media[issue], strict=True)), "a copy"
        out = {row for other in self.leases.values() if other.task == task for row in other.row_ids}
        assert not out & set(lease.row_ids)
        assert not self.had[task].keys() & set(lease.row_ids)
        if step is not None:
            assert all(step <= self.due(*self.put[issue]) for issue in groups)
            assert self.num_taken(step) + len(groups) <= self.limits.prompts_per_step
            if self.limits.in_order:
                held = {issue for other in self.leases.values() if other.task == task for issue in other.group_ids}
                others = {*self.tickets, *self.core.tickets.again, *self.put} - held - groups
                assert max(groups) < min(others, default=1 << 60)
        self.leases[lease.lease_id] = replace(lease, shared={})
        self.steps[lease.lease_id] = step

    def num_takeable(self, task: str, columns: set[str], step: int | None) -> int:
        """How many groups a claim must be able to get now; as few as possible where a step waits for stragglers."""
        held = {issue for lease in self.leases.values() if lease.task == task for issue in lease.group_ids}
        live = sorted({*self.tickets, *self.core.tickets.again, *self.put} - held)
        groups = self.core.rows.groups
        ready = [i in groups and task not in groups[i].done and columns <= groups[i].columns.keys() for i in live]
        if step is None:
            return sum(ready)
        late = [issue in self.put and self.due(*self.put[issue]) < step for issue in live]
        if self.limits.in_order:
            if any(self.num_taken(earlier) < self.limits.prompts_per_step for earlier in range(self.step, step)):
                return 0
            fits = [is_ready and not is_late for is_ready, is_late in zip(ready, late, strict=True)]
            return fits.index(False) if False in fits else len(fits)
        if self.limits.on_stale == "wait":
            return sum(ready) if step == self.step and all(ready) else 0
        return sum(is_ready and not is_late for is_ready, is_late in zip(ready, late, strict=True))

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
        mine = self.of_step(self.step)
        issues = sorted({issue for lease in mine for issue in lease.group_ids})
        claimed = {issue for lease in self.leases.values() if lease.task == "actor" for issue in lease.group_ids}
        self.call(self.core.ack([lease.lease_id for lease in mine], step=self.step))
        for lease in mine:
            self.settled(lease)
        self.trained.append(issues)
        for issue in issues:
            del self.put[issue]
        for issue in self.put.keys() - self.core.rows.groups.keys():  # left behind by this step
            assert issue not in claimed
            assert self.due(*self.put[issue]) < self.step or self.step == self.limits.num_steps
        self.forget_gone()
        assert not any(self.due(*self.put[issue]) < self.step for issue in self.put)
        if publish:
            self.publish()

    def forget_gone(self) -> None:
        """Leases live on with what is left of them."""
        self.put = {issue: versions for issue, versions in self.put.items() if issue in self.core.rows.groups}
        self.tickets = {issue: ticket for issue, ticket in self.tickets.items() if issue in self.core.tickets.in_flight}
        for lease_id, lease in list(self.leases.items()):
            keep = [i for i, row in enumerate(lease.row_ids) if self.core.rows.has(row)]
            rows, groups = tuple(lease.row_ids[i] for i in keep), tuple(lease.group_ids[i] for i in keep)
            if not rows:
                self.call(self.core.release(lease_id))
                del self.leases[lease_id]
            else:
                self.leases[lease_id] = Lease(lease_id, lease.task, rows, groups, lease.columns, lease.deadline_s)

    @precondition(lambda self: hasattr(self, "core"))
    @rule(rounds=st.integers(1, 4), num_stragglers=st.integers(0, 3))
    def everything_goes_well(self, rounds: int, num_stragglers: int) -> None:
        """All groups but the first few come, the critic finishes them and the trainer takes all it may: lives get old enough to
        meet the bound."""
        for _ in range(rounds):
            self.try_to_admit(9)
            for issue in sorted(self.tickets)[num_stragglers:]:
                self.put_one(issue, has_media=issue % 2 > 0)
            self.work_off()

    def work_off(self) -> None:
        self.claim_as_critic(5)
        while any(lease.task == "critic" for lease in self.leases.values()):
            self.critic_commits(False)
        self.claim_as_actor(5)
        if self.num_taken(self.step) == self.limits.prompts_per_step:
            self.actor_commits(True)

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        lease_id = one_of(self.leases, pick)
        self.call(self.core.release(lease_id))
        del self.leases[lease_id]

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(pick=PICK)
    def all_but_those_that_renew_are_late(self, pick: int) -> None:
        kept = set(sorted(self.leases)[: pick % (len(self.leases) + 1)])
        for _ in range(2):
            self.call(self.core.renew([*kept, "an-unknown-lease"]))
            self.clock.time_s += 6.0
        self.core.claims.expire()
        for lease_id in self.leases.keys() - kept:
            with pytest.raises(StaleHandle, match="ran past"):
                self.call(self.core.ack([lease_id], step=self.steps[lease_id]))
            del self.leases[lease_id]

    @precondition(lambda self: getattr(self, "put", None))
    @rule(pick=PICK, reissue=st.booleans())
    def drop(self, pick: int, reissue: bool) -> None:
        issue = one_of(self.put, pick)
        self.call(self.core.drop(self.core.rows.groups[issue].row_ids, "poison", reissue=reissue))
        assert (self.prompts[issue] in self.core.tickets.numbers.waiting) is reissue
        self.forget_gone()

    @rule()
    def publish(self) -> None:
        self.version = self.step * self.limits.updates_per_step
        self.call(self.core.announce(make_manifest(self.version)))
        with contextlib.suppress(WaitTimeout):
            assert self.call(self.core.next_manifest("engine", 0.0)) == make_manifest(self.version)
            self.call(self.core.acknowledge("engine", self.version))
