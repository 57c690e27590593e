"""The sending side of weight sync.

    trainer's thread   begin: a free buffer -> copy --+--> the next step
    other threads                                     '-> hash, bucket by bucket --+
    event loop                                                                     '-> announce ... acknowledged -> buffer free

The copy is all that the trainer waits for; hashing starts after it, since beside it both take longer and end no sooner. A
version that was not announced when the next one is there already is skipped.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import TYPE_CHECKING

from relax.bus.transfer_queue import TransferQueue
from relax.errors import BusError, WaitTimeout, WeightSyncError
from relax.types import WeightManifest
from relax.weights.buffer_pool import BufferPool
from relax.weights.layout import BUCKET_BYTES, Table, lay_out, views
from relax.weights.manifest import Canary, make_manifest
from relax.weights.shared_memory import BufferFile, NoRoom, ShmFolder

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("relax.weights")

_ACKNOWLEDGE_S = 60.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one version, copied and not yet announced; `number` counts a publisher's.

    `seconds`: what the trainer waited for it.
    """

    version: int
    number: int
    file: BufferFile
    tensors: Table
    canary: Canary
    seconds: float


class WeightPublisher:
    """Publishes policy versions to the receivers on this host.

        snapshot = await publisher.snapshot_with_retries(version, backend.weights, backend.canary)
        ...                                             # the next step may begin: the snapshot is its own copy
        await publisher.publish_with_retries(snapshot)  # hashed and announced, beside it

    A version is announced whole, or not at all.
    """

    def __init__(self, bus: TransferQueue, run_id: str, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bus, self._bucket_bytes = bus, bucket_bytes
        self._folder = ShmFolder(run_id)
        self._pool = BufferPool(self._folder)
        self._targets: dict[BufferFile, tuple[mmap, Table, Mapping[str, Tensor]]] = {}
        self._unsettled: list[int] = []
        self._watcher: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # versions are announced in order
        self._newest = 0  # number of the newest snapshot
        self._num_failed = self._num_skipped = 0  # since the last announcement

    # -- begin --------------------------------------------------------------------------------------------------------
    def snapshot(self, version: int, weights: Mapping[str, "Tensor"], canary: Canary) -> Snapshot:
        """Copies `weights` (any device, layout of memory or data type) into a free buffer. Blocking, and nothing but the copy.

        `canary`: tokens, and the log-prob of each after the first. Raises `WeightSyncError` when those are not finite: such
        weights must not reach an engine; and `NoRoom` or `OSError` where a later attempt may succeed.
        """
        tokens, logprobs = tuple(int(token) for token in canary[0]), tuple(float(value) for value in canary[1])
        assert len(logprobs) == len(tokens) - 1, "the canary has one log-prob for each token after the first"
        if not all(map(math.isfinite, logprobs)):
            raise WeightSyncError(
                f"version {version} is not published: its canary's log-probs are not finite; training diverged"
            )
        started = time.perf_counter()
        table, num_bytes = lay_out(weights)
        file = self._pool.take(version, num_bytes)
        try:
            self._copy(weights, file, table)
        except BaseException:
            self._pool.give_back(file)
            raise
        finally:
            file.unlock()
        self._newest += 1
        return Snapshot(version, self._newest, file, table, (tokens, logprobs), time.perf_counter() - started)

    def _copy(self, weights: Mapping[str, "Tensor"], file: BufferFile, table: Table) -> None:
        import torch  # here: the publisher's owner is imported by processes that never compute

        with torch.no_grad():
            for name, target in self._views(file, table).items():
                target.copy_(weights[name])

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

    async def snapshot_with_retries(
        self,
        version: int,
        weights: Callable[[], Mapping[str, "Tensor"]],
        canary: Callable[[], Canary],
        *,
        max_attempts: int = 5,
    ) -> Snapshot:
        """`snapshot` in a thread, again after a growing pause when there is no room or the disk fails.

        Nothing may change the weights meanwhile. Raises the last error after `max_attempts`.
        """
        for attempt in range(max_attempts):
            try:
                return await asyncio.to_thread(lambda: self.snapshot(version, weights(), canary()))
            except (NoRoom, OSError) as error:
                await self._failed(version, attempt, max_attempts, error)
        raise AssertionError("the last failure is raised")

    # -- buckets and end ----------------------------------------------------------------------------------------------
    async def publish(self, snapshot: Snapshot) -> bool:
        """Announces the snapshot once it is hashed. Publish each snapshot once, in order.

        False: a newer one was there before its turn came, so it was skipped.
        """
        async with self._turn:
            return await self._publish(snapshot)

    async def publish_with_retries(self, snapshot: Snapshot, *, max_attempts: int = 5) -> bool:
        """As `publish`, again after a growing pause when the queue does not answer in time or the disk fails.

        Raises the last error after `max_attempts`; the version was not announced then.
        """
        for attempt in range(max_attempts):
            try:
                return await self.publish(snapshot)
            except (WaitTimeout, OSError) as error:
                if attempt + 1 == max_attempts:
                    self._pool.give_back(snapshot.file)
                await self._failed(snapshot.version, attempt, max_attempts, error)
        raise AssertionError("the last failure is raised")

    async def _publish(self, snapshot: Snapshot) -> bool:
        file = snapshot.file
        assert file.data is not None, "the publisher is closed"
        if snapshot.number < self._newest:
            log.info("version %d is skipped: a newer one is ready", snapshot.version)
            self._pool.give_back(file)
            self._num_skipped += 1
            return False
        started = time.perf_counter()
        with memoryview(file.data) as content:
            manifest = await asyncio.to_thread(self._manifest, snapshot, content)
        digest_s = time.perf_counter() - started
        await self._bus.announce(manifest)
        self._pool.release(file)
        self._unsettled.append(snapshot.version)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), name="relax-weights-acknowledged")
        event = {
            "kind": "publication",
            "version": snapshot.version,
            "publish/snapshot_s": snapshot.seconds,
            "publish/digest_s": digest_s,
            "publish/bytes": manifest.num_bytes,
            "publish/buffers": len(self._pool),
            "publish/failed": self._num_failed,
            "publish/skipped": self._num_skipped,
        }
        self._num_failed = self._num_skipped = 0
        await self._report(event)
        return True

    def _manifest(self, snapshot: Snapshot, content: memoryview) -> WeightManifest:
        return make_manifest(
            snapshot.version,
            content,
            snapshot.tensors,
            snapshot.canary,
            location=str(snapshot.file.path),
            transport=snapshot.file.transport,
            bucket_bytes=self._bucket_bytes,
        )

    async def _failed(self, version: int, attempt: int, max_attempts: int, error: Exception) -> None:
        """Counts a failure and waits; raises it when it was the last one."""
        self._num_failed += 1
        log.warning("version %d could not be published (%d of %d): %s", version, attempt + 1, max_attempts, error)
        await self._report({"kind": "publication_failed", "version": version, "failures": attempt + 1, "error": str(error)})
        if attempt + 1 == max_attempts:
            raise WeightSyncError(f"version {version} could not be published in {max_attempts} attempts: {error}") from error
        await asyncio.sleep(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S))

    async def _report(self, event: Mapping[str, object]) -> None:
        try:
            await self._bus.emit(event)
        except WaitTimeout as error:  # a version that was announced counts, whether or not its event arrived
            log.warning("weights: an event of version %s is lost: %s", event["version"], error)

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
