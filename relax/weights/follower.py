"""Keeps one receiver at the newest published version: subscribe, load, acknowledge or reject, again and again."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from relax.bus.transfer_queue import TransferQueue
from relax.errors import BusError, WaitTimeout, WeightSyncError
from relax.types import WeightManifest

log = logging.getLogger("relax.weights")

_WAIT_S = 60.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0


async def follow(
    bus: TransferQueue, subscriber: str, load: Callable[[WeightManifest], Awaitable[float]], *, max_failures: int = 5
) -> None:
    """Runs until it is cancelled; unsubscribes at its end, however that comes.

    `load` takes a version in, proven by digest and canary, and returns the canary's largest log-prob difference. When it raises
    `WeightSyncError` the version is rejected with the reason, and the newest one is tried after a growing pause; the
    `max_failures`-th failure in a row is raised. Each attempt is an event of kind "weights".
    """
    loop = asyncio.get_running_loop()
    held, failures = -1, 0
    await bus.subscribe(subscriber)
    try:
        while True:
            try:
                manifest = await bus.next_manifest(subscriber, held, _WAIT_S)
            except WaitTimeout:
                continue
            started = loop.time()
            event = {"kind": "weights", "subscriber": subscriber, "version": manifest.version}
            try:
                difference = await load(manifest)
            except WeightSyncError as error:
                failures += 1
                log.warning("%s rejects version %d (%d in a row): %s", subscriber, manifest.version, failures, error)
                await bus.reject(subscriber, manifest.version, str(error))
                await bus.emit({**event, "load_s": loop.time() - started, "rejected": str(error), "failures": failures})
                if failures >= max_failures:
                    raise WeightSyncError(
                        f"{subscriber}: {failures} failures in a row to take weights; the last: {error}"
                    ) from error
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (failures - 1), _LONGEST_PAUSE_S))
                continue
            held, failures = manifest.version, 0
            await bus.acknowledge(subscriber, manifest.version)
            await bus.emit({**event, "load_s": loop.time() - started, "canary_diff": float(difference)})
    finally:
        with contextlib.suppress(BusError):  # the queue may have ended first
            await bus.unsubscribe(subscriber)
