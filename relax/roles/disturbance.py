"""Faults on purpose inside a role's or an engine's process: slow calls, lost messages, refused publications."""

import asyncio
import random
from typing import Any, cast

from relax.bus.transfer_queue import TransferQueue
from relax.config.faults import FaultEvent
from relax.errors import WeightSyncError


class Disturbance:
    """The faults that are in force here; each hits `count` times and is over. Does nothing until one is added."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._left: list[tuple[FaultEvent, int]] = []

    def add(self, event: FaultEvent) -> None:
        """From now on `event` is in force."""
        self._left.append((event, event.count))

    async def delay(self) -> None:
        """Waits as long as a call of the transfer queue is held up."""
        if (event := self._hit("delay")) is not None:
            await asyncio.sleep(event.seconds)

    def loses_message(self) -> bool:
        """Whether the message that is about to be sent, or has come, is lost."""
        return self._hit("lose_messages") is not None

    def check_sync(self) -> None:
        """Raises `WeightSyncError` when a publication is to be refused."""
        if self._hit("fail_sync") is not None:
            raise WeightSyncError("refused on purpose (faults.events)")

    def _hit(self, kind: str) -> FaultEvent | None:
        for index, (event, left) in enumerate(self._left):
            if event.kind == kind and self._random.random() < event.probability:
                if left > 1:
                    self._left[index] = event, left - 1
                else:
                    del self._left[index]
                return event
        return None


class _SlowQueue:
    """Every call of the face waits for the disturbance first."""

    def __init__(self, bus: TransferQueue, disturbance: Disturbance) -> None:
        self._bus, self._disturbance = bus, disturbance

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._bus, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            await self._disturbance.delay()
            return await method(*arguments, **options)

        return call


def slowed(bus: TransferQueue, disturbance: Disturbance) -> TransferQueue:
    """The same queue, whose calls are held up as `disturbance` says. Only for rehearsals: others should not pay for it."""
    return cast(TransferQueue, _SlowQueue(bus, disturbance))
