"""The digest of a published buffer: SHA-256 over its tensor table and over the digests of its chunks.

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


def content_digest(buffer: memoryview, table: Table, *, num_threads: int | None = None) -> str:
    """`"sha256:..."` of the bytes and of what they mean. By default half of the processors take part, at most 8."""
    chunks = [buffer[start : start + CHUNK_BYTES] for start in range(0, len(buffer), CHUNK_BYTES)]
    threads = min(num_threads or min(_MAX_THREADS, (os.cpu_count() or 1) // 2), len(chunks))
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="relax-digest") as pool:
            parts = list(pool.map(_digest, chunks))
    else:
        parts = [_digest(chunk) for chunk in chunks]
    rows = [[name, kind, list(shape), offset] for name, (kind, shape, offset) in sorted(table.items())]
    whole = hashlib.sha256(json.dumps([len(buffer), rows]).encode())
    for part in parts:
        whole.update(part)
    return f"sha256:{whole.hexdigest()}"


def _digest(chunk: memoryview) -> bytes:
    return hashlib.sha256(chunk).digest()
