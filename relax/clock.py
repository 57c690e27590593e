"""Time as a value that can be handed in, so that tests decide what time it is."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the package asks of time: a monotonic reading and a sleep, both in seconds."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
