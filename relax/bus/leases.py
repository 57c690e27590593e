"""Rows in the hands of consumers: leases with a deadline, found by id, returned when the deadline passes."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from relax.bus.groups import Group
from relax.clock import Clock
from relax.errors import StaleHandle

_MAX_REMEMBERED = 4096  # settled leases whose end is still known, for the message


@dataclass(slots=True, eq=False)
class Held:
    """A lease as the core sees it. `delivered` is false while another rank's shard waits for its rank."""

    lease_id: str
    task: str
    step: int | None
    consumer: str
    groups: list[Group]
    deadline: float
    delivered: bool = False
    gone: list[Group] = field(default_factory=list)  # dropped or trained meanwhile; their arrays may still be read

    @property
    def row_ids(self) -> tuple[int, ...]:
        return tuple(row for group in self.groups for row in group.row_ids)


class LeaseTable:
    """All leases that are not settled."""

    def __init__(self, clock: Clock, lease_s: float, incarnation: int) -> None:
        self._clock, self.lease_s, self._incarnation = clock, lease_s, incarnation
        self._held: dict[str, Held] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._gone: Counter[int] = Counter()  # issue -> open leases that it was taken from, trained or dropped
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return len(self._held)

    def open(self, task: str, step: int | None, consumer: str, groups: list[Group]) -> Held:
        self._count += 1
        lease_id = f"{self._incarnation:06x}-{task}-{self._count}"
        held = Held(lease_id, task, step, consumer, groups, -1.0)
        self._held[lease_id] = held
        self.renew(held)
        return held

    def renew(self, held: Held) -> None:
        """The deadline is `lease_s` from now."""
        deadline = self._clock.now() + self.lease_s
        if deadline != held.deadline:
            held.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, held.lease_id))

    def renew_open(self, lease_ids: Iterable[str]) -> None:
        """Those that have not ended; the others are left out."""
        for lease_id in lease_ids:
            if lease_id in self._held:
                self.renew(self._held[lease_id])

    def get(self, lease_id: str) -> Held:
        """Raises `StaleHandle`, with what became of it, for a lease that is settled or of another incarnation."""
        held = self._held.get(lease_id)
        if held is None:
            if not lease_id.startswith(f"{self._incarnation:06x}-"):
                raise StaleHandle(f"lease {lease_id} belongs to an earlier life of the transfer queue")
            raise StaleHandle(f"lease {lease_id} {self._ended.get(lease_id, 'is settled')}")
        return held

    def take_from(self, held: Held, group: Group) -> None:
        """The group left the queue, trained or dropped, while it was leased."""
        held.groups.remove(group)
        held.gone.append(group)
        self._gone[group.issue] += 1

    def has_lost(self, issue: int) -> bool:
        """Whether the issue left the queue under a lease that is still open."""
        return self._gone[issue] > 0

    def end(self, held: Held, how: str) -> None:
        del self._held[held.lease_id]
        for group in held.gone:
            self._gone[group.issue] -= 1
            if not self._gone[group.issue]:
                del self._gone[group.issue]
        self._ended[held.lease_id] = how
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def expired(self) -> list[Held]:
        """Leases past their deadline; they stay in the table until `end`."""
        found, now = [], self._clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease_id = heapq.heappop(self._deadlines)
            held = self._held.get(lease_id)
            if held is not None and held.deadline == deadline:
                found.append(held)
        return found

    def alarm_s(self) -> float | None:
        """Seconds until the next deadline."""
        while self._deadlines and self._deadlines[0][1] not in self._held:
            heapq.heappop(self._deadlines)
        return max(0.0, self._deadlines[0][0] - self._clock.now()) if self._deadlines else None

    def all(self) -> list[Held]:
        return list(self._held.values())
