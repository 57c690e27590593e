"""What one connected client holds: leases, tickets, names, blocks of memory, calls under way and answers to remember."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from relax.bus.arena import Block
from relax.bus.core import Core
from relax.bus.processes import ProcessId
from relax.errors import StaleHandle

_MAX_UNDONE = 1 << 16  # answers that a client may still give back
_MAX_ANSWERS = 32 << 20  # bytes of answers that a client may still ask for again

Frames = list[bytes]


class Names:
    """Names that one client goes by, of receivers or holders. A name belongs to the client that took it last: one that is gone
    must not take away what its successor has."""

    def __init__(self, owners: "dict[str, Names]") -> None:
        self._owners = owners  # shared by all clients

    def take(self, name: str) -> None:
        self._owners[name] = self

    def discard(self, name: str) -> None:
        if self._owners.get(name) is self:
            del self._owners[name]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, owner in self._owners.items() if owner is self])

    def __len__(self) -> int:
        return len(list(iter(self)))


class Owners:
    """Which client has which name."""

    def __init__(self) -> None:
        self.subscriptions: dict[str, Names] = {}
        self.holds: dict[str, Names] = {}


class Session:
    """One client. Everything it holds goes back to the core when it ends."""

    def __init__(self, core: Core, owners: Owners, identity: bytes, name: str, process: ProcessId) -> None:
        self._core = core
        self.identity, self.name, self.process = identity, name or f"process {process.pid}", process
        self.leases: set[str] = set()
        self.tickets: set[int] = set()
        self.subscriptions, self.holds = Names(owners.subscriptions), Names(owners.holds)
        self.blocks: dict[int, Block] = {}
        self.spare = 0  # key of the block that was handed out ahead of a payload
        self._next_block = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._undo: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self._answers: dict[int, Frames | None] = {}  # by call; `None`: under way, or no longer remembered
        self._sizes: deque[tuple[int, int]] = deque()  # (call, bytes of its answer) in the order of the answers
        self._num_bytes = 0
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
        return {
            "leases": len(self.leases),
            "tickets": len(self.tickets),
            "subscriptions": len(self.subscriptions),
            "holds": len(self.holds),
        }

    # -- calls --------------------------------------------------------------------------------------------------------
    def begin(self, number: int) -> bool:
        """Whether this call comes for the first time."""
        if number in self._answers:
            return False
        self._answers[number] = None
        return True

    def answered(self, number: int, frames: Frames) -> None:
        """The call is done; its answer is remembered, should it get lost."""
        self._answers[number] = frames
        size = sum(map(len, frames))
        self._sizes.append((number, size))
        self._num_bytes += size
        while self._num_bytes > _MAX_ANSWERS:
            forgotten, size = self._sizes.popleft()
            self._answers[forgotten] = None
            self._num_bytes -= size

    def answer(self, number: int) -> Frames | None:
        return self._answers.get(number)

    def under_way(self) -> list[int]:
        return list(self._tasks)

    def has_answers_before(self, oldest: int) -> None:
        """The client has the answers of all calls before `oldest`."""
        self._answers = {number: frames for number, frames in self._answers.items() if number >= oldest}
        self._sizes = deque(item for item in self._sizes if item[0] >= oldest)
        self._num_bytes = sum(size for _, size in self._sizes)
        for number in [number for number in self._undo if number < oldest]:
            del self._undo[number]

    def run(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def can_undo(self, number: int, undo: Callable[[], None]) -> None:
        """`undo` gives back what the answer to call `number` hands out, should its caller be gone when it arrives."""
        self._undo[number] = undo
        if len(self._undo) > _MAX_UNDONE:
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

    def let_go(self, holder: str) -> None:
        if holder in set(self.holds):
            self.holds.discard(holder)
            self._core.drop_holder(holder)

    def end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._core.waits.closed is None:
            for lease_id in list(self.leases):
                self.return_lease(lease_id)
            self.return_tickets(sorted(self.tickets))
            for subscriber in self.subscriptions:
                self.subscriptions.discard(subscriber)
                self._core.drop_subscriber(subscriber)
            for holder in self.holds:
                self.let_go(holder)
        self.blocks.clear()
