"""Where each tensor lies in a published buffer.

A table maps every name to (data type, shape, offset in bytes), as `WeightManifest.tensors` holds it. Tensors follow one
another in the order given, each at a multiple of `ALIGNMENT`; names that share one tensor (tied weights) share its bytes.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from relax.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor, dtype

Table = Mapping[str, tuple[str, tuple[int, ...], int]]

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element's size


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


def views(buffer: "Tensor", table: Table) -> dict[str, "Tensor"]:
    """The tensors of `table` as views into `buffer`, uint8 `[num_bytes]`.

    Raises `WeightSyncError` for a table that does not fit the buffer.
    """
    found: dict[str, Tensor] = {}
    for name, (kind, shape, offset) in table.items():
        element = _dtype(name, kind)
        size = math.prod(shape) * element.itemsize
        if min((0, *shape)) < 0 or offset < 0 or offset % element.itemsize or offset + size > buffer.numel():
            raise WeightSyncError(
                f"weights: tensor {name!r} ({kind} {list(shape)} at byte {offset}) does not fit {buffer.numel()} bytes"
            )
        found[name] = buffer[offset : offset + size].view(element).view(shape)
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
