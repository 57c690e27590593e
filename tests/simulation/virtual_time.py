"""An event loop whose clock jumps: nothing sleeps, and what happens depends on the timers alone.

When no callback is ready, time moves on to the next timer at once. Work for threads runs on the spot. So an hour of a run takes
as long as its callbacks take, and two runs with the same seeds are the same, callback for callback.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready, no timer is set: no task could ever go on."""


class _Selector(selectors.SelectSelector):
    """Waits by moving the loop's clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock(f"at {self.now_s:.3f} s nothing is ready and no timer is set")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual; `now` and `sleep` make it a `relax.clock.Clock` as well."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-6  # timers are due at their time exactly: rounding must not put it off for ever

    def time(self) -> float:
        return self._virtual.now_s

    now = time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 the caller's to handle, as a thread's would be
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """Runs `work` in virtual time. Raises `TimeoutError` once `deadline_s` virtual seconds have passed."""

    async def limited() -> T:
        async with asyncio.timeout(deadline_s):
            return await work

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())
