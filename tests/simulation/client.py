"""A process's connection to the queue: calls take a while, and what it holds goes back when the process dies."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from simulation.judge import Judge

from relax.bus.core import Core
from relax.bus.processes import ProcessId
from relax.bus.sessions import Owners, Session
from relax.bus.transfer_queue import Lease, Ticket
from relax.types import Column

_NOBODY = ProcessId(0, 0)


class Client:
    """As `bus/client.py` and `bus/server.py` between them, without the sockets: the same core, the same session.

    `frozen_until`: the process does nothing before. The judge is told what the core was told, at the very moment.
    """

    def __init__(self, core: Core, owners: Owners, judge: Judge, name: str, rng: random.Random) -> None:
        self._core, self._judge, self._rng = core, judge, rng
        self.session = Session(core, owners, name.encode(), name, _NOBODY)
        self.frozen_until = 0.0

    def __getattr__(self, name: str) -> Any:
        """Calls that hand nothing out: a delay before them."""
        method = getattr(self._core, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            await self._delay()
            return await method(*arguments, **options)

        return call

    async def _delay(self) -> None:
        await asyncio.sleep(self._rng.random() * 0.02)
        if (left := self.frozen_until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)

    # -- calls that hand something out: it goes back when the answer does not arrive ---------------------------------------
    async def admit(self, count: int, wait_s: float) -> list[Ticket]:
        await self._delay()
        tickets = await self._core.admit(count, wait_s)
        issues = [ticket.issue for ticket in tickets]
        self.session.tickets.update(issues)
        self._judge.admitted(tickets)
        try:
            await self._delay()
        except asyncio.CancelledError:
            self.session.return_tickets(issues)
            raise
        return tickets

    async def claim(self, task: str, columns: Sequence[str], **options: Any) -> Lease:
        await self._delay()
        lease = await self._core.claim(task, columns, **options)
        self.session.leases.add(lease.lease_id)
        try:
            await self._delay()
        except asyncio.CancelledError:
            self.session.return_lease(lease.lease_id)
            raise
        return lease

    async def subscribe(self, subscriber: str, **options: Any) -> None:
        await self._delay()
        await self._core.subscribe(subscriber, **options)
        self.session.subscriptions.take(subscriber)

    # -- calls that give something back -------------------------------------------------------------------------------------
    async def put_group(self, issue: int, columns: Mapping[str, Column], wait_s: float) -> list[int]:
        await self._delay()
        row_ids = await self._core.put_group(issue, columns, wait_s)
        self.session.tickets.discard(issue)
        return row_ids

    async def forfeit(self, issue: int, outcome: str, reason: str) -> None:
        await self._delay()
        await self._core.forfeit(issue, outcome, reason)
        self.session.tickets.discard(issue)
        self._judge.forfeited(issue, outcome)

    async def ack(self, lease_ids: Sequence[str], *, step: int | None = None) -> None:
        await self._delay()
        await self._core.ack(lease_ids, step=step)
        self.session.leases.difference_update(lease_ids)
        if step is not None:
            self._judge.trained(step, lease_ids)

    async def unsubscribe(self, subscriber: str) -> None:
        await self._delay()
        await self._core.unsubscribe(subscriber)
        self.session.subscriptions.discard(subscriber)

    async def hold_engines(self, holder: str, wait_s: float) -> None:
        await self._delay()
        await self._core.hold_engines(holder, wait_s)
        self.session.holds.take(holder)

    async def let_go(self, holder: str) -> None:
        await self._delay()
        self.session.let_go(holder)

    async def snapshot(self, path: str) -> None:
        await self._delay()
        await self._core.snapshot(path)
        self._judge.mark()
