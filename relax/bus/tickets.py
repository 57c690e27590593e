"""Tickets: issue numbers, the admission rule, and every issue's fate.

The i-th ticket that was not forfeited falls in batch `i // prompts_per_step`. It may be given when
`batch - version <= max_staleness`, where `version` is the oldest that any receiver of weights computes with.
"""

import heapq
from collections import Counter

from relax.bus.ledger import Fate, Ledger
from relax.bus.transfer_queue import QueueLimits, Ticket
from relax.bus.versions import Versions
from relax.errors import BusError, StaleHandle

_OUTCOMES = {"filtered": Fate.FILTERED, "failed": Fate.FAILED}


class Tickets:
    """Who may generate what. `in_flight`: tickets given and not put; `again`: issues to be given once more, a heap."""

    def __init__(self, limits: QueueLimits, versions: Versions, ledger: Ledger | None) -> None:
        self._limits, self._versions, self._ledger = limits, versions, ledger
        self.next_issue = 0
        self.in_flight: dict[int, Ticket] = {}
        self.again: list[int] = []
        self.fates: Counter[str] = Counter()  # settled issues
        self.num_queued = 0  # issues with rows in the queue

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

    # -- giving -------------------------------------------------------------------------------------------------------
    def admit(self, count: int) -> list[Ticket]:
        """Up to `count` tickets that may be given now."""
        given: list[Ticket] = []
        floor = self._versions.floor
        while floor is not None and len(given) < count and self.num_used < self.num_places:
            batch = self.num_used // self._limits.prompts_per_step
            if batch - floor > self._limits.max_staleness:
                break
            if self.again:
                issue = heapq.heappop(self.again)
            else:
                issue = self.next_issue
                self.next_issue += 1
            ticket = Ticket(issue, floor, batch)
            self.in_flight[issue] = ticket
            given.append(ticket)
            if self._ledger:
                self._ledger.issued(issue, floor, batch)
        return given

    def waiting_for(self) -> str:
        """Why no ticket can be given, in words."""
        if self.num_used >= self.num_places:
            return (
                f"one of the run's {self.num_places} places to become free: {self.fates[Fate.TRAINED]} groups are trained, "
                "the others are on their way; a filtered or failed group would free one"
            )
        if not self._versions.held:
            return "the first receiver of weights to subscribe"
        silent = sorted(name for name, version in self._versions.held.items() if version is None)
        if silent:
            return f"{', '.join(silent)} to acknowledge a first policy version"
        batch = self.num_used // self._limits.prompts_per_step
        return (
            f"a place in batch {batch} (max_staleness {self._limits.max_staleness}): "
            f"{self._versions.waiting_for(batch - self._limits.max_staleness)}"
        )

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

    def trained(self, issue: int, step: int | None) -> None:
        self.num_queued -= 1
        self._settle(issue, Fate.TRAINED, "", step)

    def dropped(self, issue: int, reason: str) -> None:
        self.num_queued -= 1
        self._settle(issue, Fate.DROPPED, reason)

    def counts(self) -> dict[str, int]:
        """Issues by fate, and `issued`, their sum."""
        settled = {fate.value: self.fates[fate] for fate in Fate if fate is not Fate.IN_FLIGHT}
        in_flight = len(self.in_flight) + len(self.again) + self.num_queued
        return {"issued": self.next_issue, "in_flight": in_flight, **settled}

    def attach(self, ledger: Ledger) -> None:
        """Goes on with a ledger that is in the same state."""
        self._ledger = ledger

    def close(self) -> None:
        if self._ledger:
            self._ledger.close()

    def commit(self) -> None:
        if self._ledger:
            self._ledger.commit()

    def _settle(self, issue: int, fate: Fate, reason: str, step: int | None = None) -> None:
        self.fates[fate] += 1
        if self._ledger:
            self._ledger.settled(issue, fate, reason, step)
