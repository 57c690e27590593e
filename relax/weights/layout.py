"""Where each tensor lies in a published buffer.

A table maps every name to (data type, shape, offset in bytes), as `WeightManifest.tensors` holds it. Tensors follow one
another in the order given, each at a multiple of `ALIGNMENT`; names that share one tensor (tied weights) share its bytes. What
travels at once is a bucket: a span of the buffer that holds whole tensors.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from relax.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor, dtype

Table = Mapping[str, tuple[str, tuple[int, ...], int]]
Span = tuple[int, int]
"""Bytes from the first number up to the second."""

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element's size
BUCKET_BYTES = 64 << 20  # what a receiver holds beside its own copy; much smaller ones would cost a call for little data


def lay_out(weights: Mapping[str, "Tensor"]) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], int]:
    """The table of `weights`, and the size in bytes of the buffer that holds them."""
    table: dict[str, tuple[str, tuple[int, ...], int]] = {}
    placed: dict[tuple[object, ...], int] = {}
    end = 0
    for name, tensor in weights.items():
        kind, shape = _name(tensor.dtype), tuple(tensor.shape)
        identity = (tensor.device, tensor.data_ptr(), kind, shape, tensor.stride())
        if tensor.numel() and identity in placed:
            table[name] = (kind, shape, placed[identity])
            continue
        table[name] = (kind, shape, end)
        placed[identity] = end
        size = tensor.numel() * tensor.element_size()
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return table, max(end, ALIGNMENT)


def cut(table: Table, num_bytes: int, bucket_bytes: int = BUCKET_BYTES) -> list[Span]:
    """The buffer's bytes as spans of whole tensors, each of at most `bucket_bytes` unless one tensor alone is larger."""
    starts = sorted({offset for _, _, offset in table.values() if offset < num_bytes} | {0})
    spans, begin = list[Span](), 0
    for start, end in pairwise((*starts, num_bytes)):
        if end - begin > bucket_bytes and start > begin:
            spans.append((begin, start))
            begin = start
    return [*spans, (begin, num_bytes)]


def by_span(table: Table, spans: Sequence[Span]) -> list[dict[str, tuple[str, tuple[int, ...], int]]]:
    """The part of `table` that lies in each of the spans, which follow one another from byte 0.

    Raises `WeightSyncError` for a tensor that does not lie in one span.
    """
    starts, parts = [start for start, _ in spans], [dict[str, tuple[str, tuple[int, ...], int]]() for _ in spans]
    for name, entry in table.items():
        kind, shape, offset = entry
        element = _dtype(name, kind)
        at = bisect_right(starts, offset) - 1
        fits = min((0, *shape)) >= 0 and offset >= 0 and offset % element.itemsize == 0
        if not fits or offset + math.prod(shape) * element.itemsize > spans[at][1]:
            where = (
                f"{spans[-1][1]} bytes" if len(spans) == 1 else f"one bucket of {spans[-1][1]} bytes in {len(spans)} buckets"
            )
            raise WeightSyncError(f"weights: tensor {name!r} ({kind} {list(shape)} at byte {offset}) does not fit {where}")
        parts[at][name] = entry
    return parts


def views(buffer: "Tensor", table: Table, first: int = 0) -> dict[str, "Tensor"]:
    """The tensors of `table`, which fit, as views into `buffer`, uint8 `[num_bytes]`, which begins at byte `first`."""
    found: dict[str, Tensor] = {}
    for name, (kind, shape, offset) in table.items():
        element = _dtype(name, kind)
        start = offset - first
        found[name] = buffer[start : start + math.prod(shape) * element.itemsize].view(element).view(shape)
    return found


@cache
def _name(element: "dtype") -> str:
    return str(element).removeprefix("torch.")


def _dtype(name: str, kind: str) -> "dtype":
    import torch  # here: the publisher's owner is imported by processes that never compute

    element = getattr(torch, kind, None)
    if not isinstance(element, torch.dtype):
        raise WeightSyncError(f"weights: tensor {name!r} has the unknown data type {kind!r}")
    return element
