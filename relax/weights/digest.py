"""Digests of published weights: SHA-256 of each bucket, over the digests of its chunks, and one over buckets and tensor table.

Chunks are hashed in threads (hashlib releases the interpreter's lock). With the processors' SHA instructions this is about
twice as fast as BLAKE2b. The version is not part of it: equal weights have equal digests.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

from relax.weights.layout import Table

CHUNK_BYTES = 4 << 20
_MAX_THREADS = 8

Buckets = tuple[tuple[int, int, str], ...]


class Digester:
    """Threads that hash; by default half of the processors, at most 8. `close` ends them."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="relax-digest")  # threads start when needed

    def digest(self, bucket: memoryview) -> str:
        """`"sha256:..."` of one bucket; waits for it."""
        chunks = [bucket[start : start + CHUNK_BYTES] for start in range(0, len(bucket), CHUNK_BYTES)]
        parts = self._pool.map(_digest, chunks) if min(self._num_threads, len(chunks)) > 1 else map(_digest, chunks)
        return f"sha256:{hashlib.sha256(b''.join(parts)).hexdigest()}"

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "Digester":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def manifest_digest(num_bytes: int, table: Table, buckets: Buckets) -> str:
    """`"sha256:..."` of the bytes, by the digests of their buckets, and of what they mean."""
    rows = [[name, kind, list(shape), offset] for name, (kind, shape, offset) in sorted(table.items())]
    whole = json.dumps([num_bytes, rows, [list(bucket) for bucket in buckets]]).encode()
    return f"sha256:{hashlib.sha256(whole).hexdigest()}"


def _digest(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()
