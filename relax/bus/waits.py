"""Waiting without polling: a call tries, sleeps until something it depends on changes, and tries again.

Retrying in the caller's own task keeps cancellation safe: nothing is handed to a caller that is no longer there.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from relax.errors import BusGone, WaitTimeout

T = TypeVar("T")

caller: ContextVar[str] = ContextVar("caller", default="")
"""Who makes the present call; the server sets it to the client's name."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that waits. `call` in words, `reason` computed when somebody asks; `since` in the loop's seconds."""

    who: str
    call: str
    key: str
    reason: Callable[[], str]
    since: float
    future: asyncio.Future[None]


class Waits:
    """Who waits for what. `totals` adds up the seconds by key."""

    def __init__(self) -> None:
        self._waiters: dict[Hashable, dict[Waiter, None]] = defaultdict(dict)
        self._waited_s: dict[str, float] = defaultdict(float)
        self.closed: str | None = None

    async def until(
        self,
        topic: Hashable,
        attempt: Callable[[], T | None],
        *,
        call: str,
        key: str,
        who: str = "",
        wait_s: float,
        reason: Callable[[], str],
        alarm_s: Callable[[], float | None] = lambda: None,
    ) -> T:
        """What `attempt` returns, as soon as that is not `None`; it is repeated when `topic` is notified.

        `alarm_s`: seconds after which to try again at the latest. Raises `WaitTimeout` with the reason after `wait_s`.
        """
        self.check_open()
        result = attempt()
        if result is not None:
            return result
        if wait_s <= 0:
            raise WaitTimeout(call, reason(), 0.0)
        loop = asyncio.get_running_loop()
        start = loop.time()
        waiter = Waiter(who or caller.get(), call, key, reason, start, loop.create_future())
        try:
            while True:
                left = start + wait_s - loop.time()
                if left <= 0:
                    raise WaitTimeout(call, reason(), loop.time() - start)
                alarm = alarm_s()
                waiter.future = loop.create_future()
                self._waiters[topic][waiter] = None
                timer = loop.call_later(left if alarm is None else max(0.0, min(left, alarm)), _wake, waiter)
                try:
                    await waiter.future
                finally:
                    timer.cancel()
                    self._waiters[topic].pop(waiter, None)
                self.check_open()
                result = attempt()
                if result is not None:
                    return result
        finally:
            if not self._waiters[topic]:
                del self._waiters[topic]
            self._waited_s[key] += loop.time() - start

    async def quietly(self, topic: Hashable, attempt: Callable[[], T | None], wait_s: float) -> T | None:
        """Like `until`, for calls that may well get nothing: `None` after `wait_s`, and no wait that a report shows."""
        try:
            return await self.until(topic, attempt, call="", key="", wait_s=wait_s, reason=lambda: "")
        except WaitTimeout:
            return None

    def notify(self, *topics: Hashable) -> None:
        """Lets the calls that wait on these topics try again, in the order in which they came."""
        for topic in topics:
            if topic in self._waiters:
                for waiter in self._waiters[topic]:
                    _wake(waiter)

    def close(self, why: str) -> None:
        """Ends every wait, and every later call, with `BusGone`."""
        self.closed = why
        self.notify(*self._waiters)

    def check_open(self) -> None:
        if self.closed is not None:
            raise BusGone(self.closed)

    def report(self) -> list[dict[str, Any]]:
        """Who waits, for what, for how long, longest first; JSON values."""
        now = asyncio.get_running_loop().time()
        waiters = sorted(self._shown(), key=lambda w: w.since)
        return [{"who": w.who, "call": w.call, "reason": w.reason(), "since_s": round(now - w.since, 3)} for w in waiters]

    def totals(self) -> dict[str, float]:
        """Seconds waited by key, the waits that go on included."""
        now = asyncio.get_running_loop().time()
        totals = {key: seconds for key, seconds in self._waited_s.items() if key}
        for waiter in self._shown():
            totals[waiter.key] = totals.get(waiter.key, 0.0) + now - waiter.since
        return {key: round(seconds, 3) for key, seconds in sorted(totals.items())}

    def _shown(self) -> list[Waiter]:
        return [waiter for group in self._waiters.values() for waiter in group if waiter.call]


def _wake(waiter: Waiter) -> None:
    if not waiter.future.done():
        waiter.future.set_result(None)
