"""Keeps one receiver at the newest published version: subscribe, load, acknowledge or reject, again and again."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from relax.bus.transfer_queue import TransferQueue
from relax.errors import BusError, StaleHandle, WaitTimeout, WeightSyncError
from relax.types import WeightManifest

log = logging.getLogger("relax.weights")

_WAIT_S = 60.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0

Load = Callable[[WeightManifest], Awaitable[float]]
GiveUp = Callable[[], Awaitable[None]]


async def follow(
    bus: TransferQueue,
    subscriber: str,
    load: Load,
    *,
    give_up: GiveUp | None = None,
    max_failures: int = 5,
) -> None:
    """Runs until it is cancelled; unsubscribes at its end, however that comes.

    `load` takes a version in, proven by digest and canary, and returns the canary's difference. When it raises
    `WeightSyncError` the version is rejected with the reason, and the newest one is tried after a growing pause; the
    `max_failures`-th failure in a row is raised. With `give_up` the receiver shares its devices with the trainer: when its
    weights are recalled it is awaited, and the version that is announced next is loaded. After the
    trainer went back, a lower version is taken like any other. Each attempt is an event of kind "weights".
    """
    await bus.subscribe(subscriber, takes_turns=give_up is not None)
    try:
        await _Follower(bus, subscriber, load, give_up, max_failures).run()
    finally:
        with contextlib.suppress(BusError):  # the queue may have ended first
            await bus.unsubscribe(subscriber)


class _Follower:
    def __init__(self, bus: TransferQueue, subscriber: str, load: Load, give_up: GiveUp | None, max_failures: int) -> None:
        self._bus, self._subscriber = bus, subscriber
        self._load, self._give_up = load, give_up
        self._max_failures = max_failures
        self._held: WeightManifest | None = None  # what the receiver computes with
        self._failures = 0

    async def run(self) -> None:
        while True:
            try:
                manifest = await self._bus.next_manifest(self._subscriber, _WAIT_S)
            except WaitTimeout:
                continue
            try:
                if manifest is None:
                    await self._let_go()
                else:
                    await self._take(manifest)
            except StaleHandle as error:  # the trainer went back meanwhile; the next announcement is taken
                log.info("%s: %s", self._subscriber, error)

    async def _let_go(self) -> None:
        assert self._give_up is not None, f"{self._subscriber} does not take turns, and its weights were recalled"
        await self._give_up()
        self._held = None
        await self._bus.gave_up(self._subscriber)

    async def _take(self, manifest: WeightManifest) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            difference = await self._load(manifest)
        except WeightSyncError as error:
            await self._reject(manifest, loop.time() - started, error)
            return
        event = self._event(manifest) | {"load_s": loop.time() - started, "canary_diff": float(difference)}
        if self._held is not None and self._held.digest == manifest.digest:
            event["identical"] = True
        self._held, self._failures = manifest, 0
        await self._bus.acknowledge(self._subscriber, manifest.version)
        await self._bus.emit(event)

    async def _reject(self, manifest: WeightManifest, load_s: float, error: WeightSyncError) -> None:
        self._failures += 1
        log.warning("%s rejects version %d (%d in a row): %s", self._subscriber, manifest.version, self._failures, error)
        await self._bus.reject(self._subscriber, manifest.version, str(error))
        await self._bus.emit(self._event(manifest) | {"load_s": load_s, "rejected": str(error), "failures": self._failures})
        if self._failures >= self._max_failures:
            raise WeightSyncError(
                f"{self._subscriber}: {self._failures} failures in a row to take weights; the last: {error}"
            ) from error
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_PAUSE_S))

    def _event(self, manifest: WeightManifest) -> dict[str, object]:
        return {"kind": "weights", "subscriber": self._subscriber, "version": manifest.version}
