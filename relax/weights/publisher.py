"""The sending side of weight sync.

    trainer's thread   snapshot: copy into a free buffer --+
    event loop                                             +-> digest in a thread -> announce ... acknowledged -> buffer free

The copy is all that the trainer waits for.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING

from relax.bus.transfer_queue import TransferQueue
from relax.errors import BusError, WaitTimeout, WeightSyncError
from relax.types import WeightManifest
from relax.weights.buffer_pool import BufferPool
from relax.weights.digest import content_digest
from relax.weights.layout import Table, lay_out, views
from relax.weights.shared_memory import BufferFile, ShmFolder

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("relax.weights")

_ACKNOWLEDGE_S = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one version, copied and not yet announced. `seconds`: what the trainer waited for it."""

    version: int
    file: BufferFile
    num_bytes: int
    tensors: Table
    canary_tokens: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    seconds: float


class WeightPublisher:
    """Publishes policy versions to the receivers on this host.

        snapshot = await asyncio.to_thread(publisher.snapshot, version, backend.weights(), backend.canary())
        ...                                # the next step may begin: the snapshot is its own copy
        await publisher.publish(snapshot)  # hashed and announced

    Raises `WeightSyncError` when no file system has room for the buffers.
    """

    def __init__(self, bus: TransferQueue, run_id: str) -> None:
        self._bus = bus
        self._folder = ShmFolder(run_id)
        self._pool = BufferPool(self._folder)
        self._targets: dict[BufferFile, tuple[mmap, Table, Mapping[str, Tensor]]] = {}
        self._unsettled: list[int] = []
        self._watcher: asyncio.Task[None] | None = None

    def snapshot(
        self, version: int, weights: Mapping[str, "Tensor"], canary: tuple[Sequence[int], Sequence[float]]
    ) -> Snapshot:
        """Copies `weights` (any device, layout of memory or data type) into a free buffer. Blocking, and nothing but the copy.

        `canary`: tokens, and the log-prob of each after the first. Raises `WeightSyncError` when those are not finite: such
        weights must not reach an engine.
        """
        tokens, logprobs = tuple(int(token) for token in canary[0]), tuple(float(value) for value in canary[1])
        assert len(logprobs) == len(tokens) - 1, "the canary has one log-prob for each token after the first"
        if not all(map(math.isfinite, logprobs)):
            raise WeightSyncError(
                f"version {version} is not published: its canary's log-probs are not finite; training diverged"
            )
        import torch  # here: the publisher's owner is imported by processes that never compute

        started = time.perf_counter()
        table, num_bytes = lay_out(weights)
        file = self._pool.take(version, num_bytes)
        try:
            with torch.no_grad():
                for name, target in self._views(file, table).items():
                    target.copy_(weights[name])
        finally:
            file.unlock()
        return Snapshot(version, file, num_bytes, table, tokens, logprobs, time.perf_counter() - started)

    def _views(self, file: BufferFile, table: Table) -> Mapping[str, "Tensor"]:
        """Where each tensor goes. Kept with the buffer: for a small model, making them takes longer than the copy."""
        import torch  # here, as above

        assert file.data is not None
        data, known, targets = self._targets.get(file, (None, {}, {}))
        if data is not file.data or known != table:
            targets = views(torch.frombuffer(file.data, dtype=torch.uint8), table)
            self._targets = {other: kept for other, kept in self._targets.items() if kept[0] is other.data}
            self._targets[file] = (file.data, table, targets)
        return targets

    async def publish(self, snapshot: Snapshot) -> None:
        """Hashes the snapshot in a thread and announces it; returns once announced. Publish each snapshot once, in order."""
        file = snapshot.file
        assert file.data is not None, "the publisher is closed"
        started = time.perf_counter()
        with memoryview(file.data) as content:
            digest = await asyncio.to_thread(content_digest, content, snapshot.tensors)
        digest_s = time.perf_counter() - started
        await self._bus.announce(
            WeightManifest(
                version=snapshot.version,
                transport=file.transport,
                location=str(file.path),
                num_bytes=snapshot.num_bytes,
                tensors=snapshot.tensors,
                digest=digest,
                canary_tokens=snapshot.canary_tokens,
                canary_logprobs=snapshot.canary_logprobs,
            )
        )
        self._pool.release(file)
        self._unsettled.append(snapshot.version)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), name="relax-weights-acknowledged")
        await self._bus.emit(
            {
                "kind": "publication",
                "version": snapshot.version,
                "publish/snapshot_s": snapshot.seconds,
                "publish/digest_s": digest_s,
                "publish/bytes": snapshot.num_bytes,
                "publish/buffers": len(self._pool),
            }
        )

    async def close(self) -> None:
        """Removes every buffer; receivers keep what they have mapped."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self._targets = {}
        self._pool.close()
        self._folder.close()

    async def _watch(self) -> None:
        """Frees buffers as versions are acknowledged, the oldest first."""
        while self._unsettled:
            version = self._unsettled[0]
            try:
                await self._bus.wait_acknowledged(version, _ACKNOWLEDGE_S)
            except WaitTimeout:
                continue
            except BusError as error:
                log.debug("weights: acknowledgements are no longer followed: %s", error)
                return
            self._pool.settle(version)
            self._unsettled.remove(version)
