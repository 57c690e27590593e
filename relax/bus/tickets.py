"""Tickets: issue numbers, the admission rule, and every issue's fate.

The i-th ticket whose place was not given up falls in batch `i // prompts_per_step`. It may be given when that is not after
`due_step(version)`, where `version` is the oldest that any receiver of weights computes with. With `num_extra`, so many more
are given beyond the places, and fall in the batch before.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from relax.bus.ledger import Fate, Ledger
from relax.bus.prompt_numbers import PromptNumbers
from relax.bus.staleness import due_step
from relax.bus.transfer_queue import QueueLimits, Ticket
from relax.bus.versions import Versions
from relax.errors import BusError, StaleHandle

_OUTCOMES = {"filtered": Fate.FILTERED, "failed": Fate.FAILED}


class Trained(NamedTuple):
    """A group that a step has trained; `age` in updates."""

    issue: int
    prompt: int
    age: int


class Tickets:
    """Who may generate what. `in_flight`: tickets given and not put; `again`: issues to be given once more, a heap.

    `prompts`: of every issue that is not settled. `trained_at`: by step, since the start or the restore.
    """

    def __init__(self, limits: QueueLimits, versions: Versions, ledger: Ledger | None) -> None:
        self._limits, self._versions, self._ledger = limits, versions, ledger
        self.next_issue = 0
        self.numbers = PromptNumbers()
        self.in_flight: dict[int, Ticket] = {}
        self.again: list[int] = []
        self.prompts: dict[int, int] = {}
        self.fates: Counter[str] = Counter()  # settled issues
        self.num_queued = 0  # issues with rows in the queue
        self.trained_at: dict[int, list[Trained]] = defaultdict(list)

    @property
    def num_places(self) -> int:
        return self._limits.prompts_per_step * self._limits.num_steps

    @property
    def num_used(self) -> int:
        """Places of the run that are taken: trained, with rows, or being generated."""
        return self.fates[Fate.TRAINED] + self.num_queued + len(self.in_flight)

    @property
    def is_finished(self) -> bool:
        return self.fates[Fate.TRAINED] >= self.num_places

    def _next_batch(self) -> int:
        return max(0, self.num_used - self._limits.num_extra) // self._limits.prompts_per_step

    @property
    def _is_full(self) -> bool:
        return self.num_used >= self.num_places + self._limits.num_extra

    # -- giving -------------------------------------------------------------------------------------------------------
    def admit(self, count: int) -> list[Ticket]:
        """Up to `count` tickets that may be given now."""
        given: list[Ticket] = []
        floor = self._versions.floor
        while floor is not None and len(given) < count and not self._is_full:
            batch = self._next_batch()
            if batch > due_step(self._limits, floor):
                break
            if self.again:
                issue = heapq.heappop(self.again)
            else:
                issue = self.next_issue
                self.next_issue += 1
                self.prompts[issue] = self.numbers.take()
            ticket = Ticket(issue, floor, batch, self.prompts[issue])
            self.in_flight[issue] = ticket
            given.append(ticket)
            if self._ledger:
                self._ledger.issued(issue, ticket.prompt, floor, batch)
        return given

    def waiting_for(self) -> str:
        """Why no ticket can be given, in words."""
        if self._is_full:
            return (
                f"one of the run's {self.num_places} places to become free: {self.fates[Fate.TRAINED]} groups are trained, "
                "the others are on their way; a filtered or failed group would free one"
            )
        if self._versions.turns.is_recalled:
            return "the trainer, whose turn it is, to announce its next version"
        if not self._versions.held:
            return "the first receiver of weights to subscribe"
        silent = sorted(name for name, version in self._versions.held.items() if version is None)
        if silent:
            return f"{', '.join(silent)} to acknowledge a first policy version"
        batch, limits = self._next_batch(), self._limits
        wanted = (batch + 1) * limits.updates_per_step - limits.max_staleness - 1
        return f"a place in batch {batch} (max_staleness {limits.max_staleness}): {self._versions.waiting_for(wanted)}"

    # -- ending -------------------------------------------------------------------------------------------------------
    def get(self, issue: int) -> Ticket:
        """The ticket of an issue that is in flight; raises `StaleHandle` for one that is settled, `BusError` otherwise."""
        ticket = self.in_flight.get(issue)
        if ticket is None:
            if not 0 <= issue < self.next_issue:
                raise BusError(f"issue {issue} was never given; {self.next_issue} issues have been")
            waits = "is waiting to be given again" if issue in self.again else "is settled, or already has rows"
            raise StaleHandle(f"the ticket of issue {issue} {waits}")
        return ticket

    def forfeit(self, issue: int, outcome: str, reason: str) -> Ticket:
        if outcome not in _OUTCOMES:
            raise BusError(f"issue {issue}: outcome {outcome!r} is not known; allowed are {', '.join(_OUTCOMES)}")
        ticket = self.get(issue)
        del self.in_flight[issue]
        self._settle(issue, _OUTCOMES[outcome], reason)
        return ticket

    def give_again(self, issue: int) -> Ticket | None:
        """Whoever had this ticket is gone: it is the next to be given. `None` when it is not in flight."""
        ticket = self.in_flight.pop(issue, None)
        if ticket is not None:
            heapq.heappush(self.again, issue)
        return ticket

    def arrived(self, issue: int, version: int, num_rows: int) -> None:
        del self.in_flight[issue]
        self.num_queued += 1
        if self._ledger:
            self._ledger.arrived(issue, version, num_rows)

    def trained(self, issue: int, step: int | None, age: int) -> None:
        if step is not None:
            self.trained_at[step].append(Trained(issue, self.prompts[issue], age))
        self.num_queued -= 1
        self._settle(issue, Fate.TRAINED, "", step)

    def dropped(self, issue: int, reason: str, *, reissue: bool) -> None:
        """A group with rows is gone."""
        self.num_queued -= 1
        self._drop(issue, reason, reissue=reissue)

    def drop_tickets(self, reason: str) -> list[int]:
        """Ends all tickets that are out or to be given again; their prompts are issued again. Returns the issues."""
        issues = [*self.in_flight, *self.again]
        self.in_flight.clear()
        self.again.clear()
        for issue in issues:
            self._drop(issue, reason, reissue=True)
        return issues

    def untrain(self, step: int, reason: str) -> list[Trained]:
        """What was trained at `step` or later is lost: dropped, and its prompts issued again."""
        lost = [trained for at in sorted(self.trained_at) if at >= step for trained in self.trained_at.pop(at)]
        for trained in lost:
            self.fates[Fate.TRAINED] -= 1
            self.prompts[trained.issue] = trained.prompt
            self._drop(trained.issue, reason, reissue=True)
        return lost

    def _drop(self, issue: int, reason: str, *, reissue: bool) -> None:
        if reissue:
            self.numbers.put_back(self.prompts[issue])
        self._settle(issue, Fate.DROPPED, reason)

    def counts(self) -> dict[str, int]:
        """Issues by fate, and `issued`, their sum."""
        settled = {fate.value: self.fates[fate] for fate in Fate if fate is not Fate.IN_FLIGHT}
        in_flight = len(self.in_flight) + len(self.again) + self.num_queued
        return {"issued": self.next_issue, "in_flight": in_flight, **settled}

    def check(self, queued: Iterable[int]) -> None:
        """The invariant, `queued` being the issues with rows. Raises `BusError` that names the counts when it is broken."""
        counts = self.counts()
        live = [*self.in_flight, *self.again, *queued]
        wrong = []
        if counts["issued"] != sum(counts.values()) - counts["issued"]:
            wrong.append("issued is not trained + filtered + failed + dropped + in_flight")
        if len(live) != counts["in_flight"] or set(live) != self.prompts.keys():
            wrong.append(f"{len(set(live))} issues live, the prompts of {len(self.prompts)} are known")
        prompts = [*self.prompts.values(), *self.numbers.waiting]
        if len(set(prompts)) != len(prompts):
            twice = sorted(prompt for prompt, count in Counter(prompts).items() if count > 1)
            wrong.append(f"prompts with two lives: {twice[:8]}")
        if wrong:
            raise BusError(f"a fault of the transfer queue: {'; '.join(wrong)}. Counts: {counts}")

    # -- ledger -------------------------------------------------------------------------------------------------------
    def attach(self, ledger: Ledger) -> None:
        """Goes on with a ledger that is in the same state."""
        self._ledger = ledger

    def close(self) -> None:
        """Raises `BusError` when the database's counts are not those of the memory; it is closed all the same."""
        if self._ledger:
            try:
                self._ledger.check(self.counts())
            finally:
                self._ledger.close()

    def commit(self) -> None:
        if self._ledger:
            self._ledger.commit()

    def _settle(self, issue: int, fate: Fate, reason: str, step: int | None = None) -> None:
        self.fates[fate] += 1
        del self.prompts[issue]
        if self._ledger:
            self._ledger.settled(issue, fate, reason, step)
