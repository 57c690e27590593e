"""What was replied already, and what is being replied now: the same question is asked once."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Reply = TypeVar("Reply")


@dataclass(slots=True, eq=False)
class _Asked(Generic[Reply]):
    task: "asyncio.Task[Reply]"
    num_waiting: int = 0


class ReplyCache(Generic[Reply]):
    """The `num_entries` most recently used replies, by key, those before the newest as long as all have at most `max_bytes`, of
    which `size` is a reply's own. Failures are not kept."""

    def __init__(self, num_entries: int, max_bytes: int = 0, size: Callable[[Reply], int] = lambda _: 0) -> None:
        self._num_entries, self._max_bytes, self._size = num_entries, max_bytes, size
        self._num_bytes = 0
        self._kept: OrderedDict[bytes, Reply] = OrderedDict()
        self._asked: dict[bytes, _Asked[Reply]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: bytes, ask: Callable[[], Awaitable[Reply]]) -> tuple[Reply, bool]:
        """The reply to `key`, and whether it cost nothing. Who asks for what is being asked waits for the same reply; when none
        waits any more, it is given up."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key], True
        asked = self._asked.get(key)
        is_first = asked is None
        if asked is None:
            asked = self._asked[key] = _Asked(asyncio.ensure_future(_await(ask)))
        asked.num_waiting += 1
        try:
            reply = await asyncio.shield(asked.task)
        finally:
            asked.num_waiting -= 1
            if asked.task.done() or not asked.num_waiting:
                asked.task.cancel()  # nothing when it is done
                if self._asked.get(key) is asked:
                    del self._asked[key]
        if is_first:
            self._keep(key, reply)
        return reply, not is_first

    def _keep(self, key: bytes, reply: Reply) -> None:
        self._kept[key] = reply
        self._num_bytes += self._size(reply)
        while len(self._kept) > self._num_entries or (self._num_bytes > self._max_bytes and len(self._kept) > 1):
            self._num_bytes -= self._size(self._kept.popitem(last=False)[1])


async def _await(ask: Callable[[], Awaitable[Reply]]) -> Reply:
    return await ask()
