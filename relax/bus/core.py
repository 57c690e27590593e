"""The core of the transfer queue: the whole face in one process, on plain asyncio.

    tickets.py    who may generate what, and every issue's fate     versions.py  receivers of weights
    rows.py       groups and their columns                          turns.py     whose turn it is on shared devices
    claims.py     who has which rows, by task                       waits.py     waiting with a reason
    staleness.py  which step a group must be consumed in            events.py    the stream of events
    departures.py groups that leave untrained                       ledger.py    the fates on disk
    sampler.py    ready sets, shards                                state.py     the state in a file

Every change of state is one synchronous function that runs to its end between two awaits, so that the parts never
disagree; the methods here only wait, and put the parts together.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.bus.claim import Claim
from relax.bus.claims import Claims
from relax.bus.columns import join, take_rows
from relax.bus.departures import Departures
from relax.bus.events import Events
from relax.bus.groups import INCARNATIONS, Group, RowIds
from relax.bus.leases import Held, LeaseTable
from relax.bus.ledger import Ledger
from relax.bus.reasons import waiting_for
from relax.bus.rows import Rows
from relax.bus.schema import REQUIRED, REQUIRED_TO_MASK, Content, Schema
from relax.bus.staleness import check_limits
from relax.bus.state import capture, write
from relax.bus.statistics import statistics
from relax.bus.tickets import Tickets
from relax.bus.transfer_queue import Lease, QueueLimits, Ticket
from relax.bus.versions import Versions
from relax.bus.waits import Waits
from relax.bus.weight_exchange import WeightExchange
from relax.clock import Clock, MonotonicClock
from relax.errors import BusError, GroupTooLarge
from relax.types import Column


class Core(WeightExchange):
    """A `TransferQueue` by itself. Use it from one event loop; arrays that are put are copied unless they are read-only.

    Shared arrays are handed out by reference.

    `clock` decides when leases end. A ledger is begun anew; `snapshot.restore` continues one.
    """

    def __init__(self, limits: QueueLimits, *, clock: Clock | None = None, ledger: Ledger | None = None) -> None:
        check_limits(limits)
        super().__init__(Versions(), Waits())
        self.limits = limits
        self.incarnation = secrets.randbelow(INCARNATIONS)
        if ledger is not None:
            ledger.restore(0, ())
        self.stream = Events()
        self.tickets = Tickets(limits, self.versions, ledger)
        schema = Schema(REQUIRED_TO_MASK if limits.on_stale == "mask" else REQUIRED)
        self.rows = Rows(RowIds(self.incarnation), limits.max_bytes, schema, limits.row_costs)
        self.leases = LeaseTable(clock or MonotonicClock(), limits.lease_s, self.incarnation)
        self.claims = Claims(limits, self.rows, self.tickets, self.leases, self.waits)
        self.departures = Departures(limits, self.tickets, self.rows, self.claims)

    # -- admission ----------------------------------------------------------------------------------------------------
    async def admit(self, count: int, wait_s: float) -> list[Ticket]:
        """Between 1 and `count` tickets, as soon as one may start; an empty list once every batch is trained."""
        if count < 1:
            raise BusError(f"admit: count = {count} must be at least 1")
        return await self.waits.until(
            "admit", lambda: self._admit(count), call="admit", key="admit", wait_s=wait_s, reason=self.tickets.waiting_for
        )

    def _admit(self, count: int) -> list[Ticket] | None:
        if self.tickets.is_finished:
            return []
        given = self.tickets.admit(count)
        self.claims.admitted(given)
        return given or None

    async def forfeit(self, issue: int, outcome: str, reason: str) -> None:
        self.waits.check_open()
        ticket = self.tickets.forfeit(issue, outcome, reason)
        self.rows.reserved.pop(issue, None)
        self.claims.withdrawn(ticket)
        self.tickets.commit()
        self.waits.notify("admit", "room")

    def give_again(self, issues: Sequence[int]) -> None:
        """The producer of these tickets is gone: those still in flight are the next to be given, under the same numbers."""
        for issue in issues:
            ticket = self.tickets.give_again(issue)
            if ticket is not None:
                self.rows.reserved.pop(issue, None)
                self.claims.withdrawn(ticket)
        self.waits.notify("admit", "room")

    # -- rows ---------------------------------------------------------------------------------------------------------
    async def reserve(self, issue: int, size: int, wait_s: float) -> list[int] | None:
        """Waits until `size` bytes for group `issue` have room and promises them; row ids if it was put already."""
        self.waits.check_open()
        if size > self.limits.max_bytes:
            raise GroupTooLarge(
                f"group {issue} has {size} bytes, the queue holds {self.limits.max_bytes} (services.queue_max_bytes)"
            )
        known = await self.waits.until(
            "room",
            lambda: self._reserve(issue, size),
            call=f"put_group {issue}",
            key="put_group",
            wait_s=wait_s,
            reason=lambda: f"room for {size} bytes: {self.rows.num_bytes} of {self.limits.max_bytes} are taken",
        )
        return known or None

    def _reserve(self, issue: int, size: int) -> list[int] | None:
        known = self.rows.ids_of(issue)
        if known is not None:
            return known
        ticket = self.tickets.get(issue)
        if issue not in self.rows.reserved and not self.rows.has_room(size) and not self.claims.is_needed(ticket):
            return None
        self.rows.reserved[issue] = size
        return []

    async def put_group(
        self, issue: int, columns: Mapping[str, Column], wait_s: float, shared: Mapping[str, NDArray[Any]] | None = None
    ) -> list[int]:
        self.waits.check_open()
        known = self.rows.ids_of(issue)
        if known is not None:
            return known
        self.tickets.get(issue)
        try:
            content = self.rows.schema.check_group(issue, columns, shared or {})
        except BusError:
            self.rows.reserved.pop(issue, None)
            raise
        if not self.departures.is_left_behind(self.departures.due(content.columns)):
            known = await self.reserve(issue, content.num_bytes, wait_s)
        return known if known is not None else self._put(issue, content)

    def _put(self, issue: int, content: Content) -> list[int]:
        ticket = self.tickets.get(issue)
        versions = content.columns["versions"]
        assert isinstance(versions, np.ndarray), "the schema lets nothing else through"
        oldest = int(versions.min())
        if oldest < ticket.version:
            self.rows.reserved.pop(issue, None)
            raise BusError(
                f"group {issue}: its column 'versions' says {oldest}, but every engine held version {ticket.version} or newer "
                "when it was admitted"
            )
        group = self.rows.add(issue, content, oldest, self.departures.due(content.columns))
        self.tickets.arrived(issue, oldest, content.num_rows)
        self.claims.arrived(group, ticket)
        if self.departures.is_left_behind(group.due):
            self.departures.drop_late(group)
            self.waits.notify("admit", "room")
        return list(group.row_ids)

    async def write(self, row_ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """As the face says. Rows that were trained or dropped under a lease that is still open are left out, and counted:
        a consumer that came after another one's death may find its work done."""
        self.waits.check_open()
        late = {row for row in row_ids if not self.rows.has(row) and self.claims.is_leased(self.rows.ids.issue_of(row))}
        if late:
            kept = [index for index, row in enumerate(row_ids) if row not in late]
            self.rows.num_late_rows += len(late)
            checked, _, _ = self.rows.schema.check("write", columns)
            row_ids, columns = [row_ids[i] for i in kept], {name: take_rows(column, kept) for name, column in checked.items()}
        if row_ids:
            self.claims.completed(self.rows.write(row_ids, columns))

    async def claim(
        self,
        task: str,
        columns: Sequence[str],
        *,
        num_groups: int,
        wait_s: float,
        at_least: int = 1,
        step: int | None = None,
        consumer: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        shared: bool = False,
    ) -> Lease:
        """As the face says. A rank whose shard is empty (fewer groups than ranks were left) gets a lease without rows."""
        claim = Claim(task, frozenset(columns), num_groups, step, consumer, rank, num_ranks, at_least)
        held = await self.hold(claim, wait_s)
        joined = {name: self._join(name, held.groups) for name in columns}
        row_ids, group_ids = rows_and_groups(held)
        arrays = {group.issue: dict(group.shared) for group in held.groups if group.shared} if shared else {}
        return Lease(held.lease_id, task, row_ids, group_ids, joined, self.limits.lease_s, arrays)

    async def hold(self, claim: Claim, wait_s: float) -> Held:
        """A claim's lease, with the groups as they lie in the queue."""
        claim.check(self.limits)
        return await self.waits.until(
            ("claim", claim.task),
            lambda: self.claims.attempt(claim),
            call=f"claim of {claim.task}" + ("" if claim.step is None else f" for step {claim.step}"),
            key=claim.task,
            who=claim.consumer,
            wait_s=wait_s,
            reason=lambda: waiting_for(claim, self.claims, self.tickets),
            alarm_s=self.leases.alarm_s,
        )

    def _join(self, name: str, groups: Sequence[Group]) -> Column:
        if groups:
            return join([group.columns[name] for group in groups])
        return self.rows.schema.shapes[name].empty() if name in self.rows.schema.shapes else []

    async def renew(self, lease_ids: Sequence[str]) -> None:
        self.waits.check_open()
        self.claims.expire()
        self.leases.renew_open(lease_ids)

    async def ack(self, lease_ids: Sequence[str], *, step: int | None = None) -> None:
        """As the face says. Raises `BusError` when the counts of the issues do not add up afterwards."""
        self.waits.check_open()
        self.claims.expire()
        self.claims.ack(lease_ids, step)
        if step is not None:
            self.departures.after_step()
            self.tickets.commit()
            self.waits.notify("admit", "room")
            self.tickets.check(self.rows.groups)

    async def release(self, lease_id: str) -> None:
        self.waits.check_open()
        self.claims.give_back(self.leases.get(lease_id), "was released")

    async def drop(self, row_ids: Sequence[int], reason: str, *, reissue: bool = False) -> None:
        """As the face says. A group that loses its last row gives its place to another prompt, or to a new issue of its own."""
        self.waits.check_open()
        by_group: dict[Group, list[int]] = {}
        for group, positions in self.rows.find(row_ids):
            by_group.setdefault(group, []).extend(positions)
        for group, positions in by_group.items():
            if len(positions) < len(group.row_ids):
                self.rows.shrink(group, positions)
                self.claims.completed([group])
            else:
                self.departures.drop(group, reason, reissue=reissue)
        self.tickets.commit()
        self.waits.notify("admit", "room")

    async def rewind(self, step: int) -> None:
        """As the face says. `step` may not be before the step that the queue began or was restored with."""
        self.waits.check_open()
        self.departures.rewind(step)
        self.versions.rewind()
        self.tickets.commit()
        self.waits.notify("admit", "room", "manifest")
        self.tickets.check(self.rows.groups)

    # -- observation --------------------------------------------------------------------------------------------------
    async def emit(self, event: Mapping[str, Any]) -> None:
        self.waits.check_open()
        self.stream.emit(event)
        self.waits.notify("events")

    async def events(self, after: int, wait_s: float) -> list[dict[str, Any]]:
        return await self.waits.quietly("events", lambda: self.stream.after(after) or None, wait_s=wait_s) or []

    async def stats(self) -> dict[str, Any]:
        self.waits.check_open()
        self.claims.expire()
        return statistics(self)

    # -- life ---------------------------------------------------------------------------------------------------------
    async def snapshot(self, path: str) -> None:
        self.waits.check_open()
        state, buffers = capture(self.limits, self.tickets, self.rows, self.claims, self.departures)
        self.tickets.commit()
        await asyncio.to_thread(write, path, state, buffers)

    async def close(self) -> None:
        """Ends every wait with `BusGone` and writes the ledger's last changes.

        Raises `BusError` when the counts of the issues do not add up, in memory or in the ledger.
        """
        if self.waits.closed is None:
            self.waits.close("the transfer queue is closed")
            self.tickets.close()
            self.tickets.check(self.rows.groups)


def rows_and_groups(held: Held) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Row ids and, for each row, its group id."""
    groups = tuple(group.issue for group in held.groups for _ in group.row_ids)
    return held.row_ids, groups
