"""What one connected client holds: leases, tickets, subscriptions, blocks of memory, calls under way."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from relax.bus.arena import Block
from relax.bus.core import Core
from relax.bus.processes import ProcessId
from relax.errors import StaleHandle

_MAX_REMEMBERED = 256  # answers that a client may still give back


class Session:
    """One client. Everything it holds goes back to the core when it ends."""

    def __init__(self, core: Core, identity: bytes, name: str, process: ProcessId) -> None:
        self._core = core
        self.identity, self.name, self.process = identity, name or f"process {process.pid}", process
        self.leases: set[str] = set()
        self.tickets: set[int] = set()
        self.subscriptions: set[str] = set()
        self.blocks: dict[int, Block] = {}
        self.spare = 0  # key of the block that was handed out ahead of a payload
        self._next_block = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._undo: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self._heard = time.monotonic()

    def heard(self) -> None:
        self._heard = time.monotonic()

    def why_dead(self, silence_s: float) -> str | None:
        """Why the client must be gone, or `None`."""
        if not self.process.is_alive:
            return f"its process {self.process.pid} ended"
        return f"silent for {silence_s:g} s" if time.monotonic() - self._heard > silence_s else None

    def belongings(self) -> dict[str, int]:
        """How much goes back to the core when the client ends; JSON values."""
        return {"leases": len(self.leases), "tickets": len(self.tickets), "subscriptions": len(self.subscriptions)}

    # -- calls --------------------------------------------------------------------------------------------------------
    def run(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def can_undo(self, number: int, undo: Callable[[], None]) -> None:
        """`undo` gives back what the answer to call `number` hands out, should its caller be gone when it arrives."""
        self._undo[number] = undo
        if len(self._undo) > _MAX_REMEMBERED:
            self._undo.popitem(last=False)

    def cancel(self, number: int) -> None:
        """The client no longer waits for this call, or did not get its answer in time."""
        if number in self._tasks:
            self._tasks[number].cancel()
        if number in self._undo:
            self._undo.pop(number)()

    # -- belongings ---------------------------------------------------------------------------------------------------
    def keep(self, block: Block) -> int:
        self._next_block += 1
        self.blocks[self._next_block] = block
        return self._next_block

    def size_of(self, key: int | None) -> int:
        """Bytes of a block that this client has; 0 for none."""
        return len(self.blocks[key]) if key is not None and key in self.blocks else 0

    def forget(self, key: int) -> None:
        self.blocks.pop(key, None)

    def return_lease(self, lease_id: str, how: str = "came back with its consumer's end") -> None:
        self.leases.discard(lease_id)
        try:
            held = self._core.leases.get(lease_id)
        except StaleHandle:
            return  # settled by another client, or past its deadline
        self._core.claims.give_back(held, how)

    def return_tickets(self, issues: list[int]) -> None:
        self.tickets.difference_update(issues)
        self._core.give_again(issues)

    def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._core.waits.closed is None:
            for lease_id in list(self.leases):
                self.return_lease(lease_id)
            self.return_tickets(sorted(self.tickets))
            for subscriber in self.subscriptions:
                self._core.drop_subscriber(subscriber)
        self.blocks.clear()
