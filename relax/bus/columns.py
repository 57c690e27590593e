"""Columns as values: slice, take, join, compare and measure the three kinds (ragged, dense, JSON)."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax.types import Column, Ragged


def plain(value: Any) -> Any:
    """numpy scalars as Python numbers, so that JSON values may hold them; raises `TypeError` for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain)


def encode_json(value: Any) -> bytes:
    """JSON values (numbers, texts, lists, dicts, None) as msgpack; raises `TypeError` or `OverflowError` for others."""
    return _ENCODER.encode(value)


def kind_of(column: Column) -> str:
    """`ragged`, `dense` or `json`."""
    return "ragged" if isinstance(column, Ragged) else "dense" if isinstance(column, np.ndarray) else "json"


def num_bytes(column: Column) -> int:
    """Bytes that the column takes; of JSON values, as msgpack."""
    if isinstance(column, Ragged):
        return int(column.values.nbytes + column.offsets.nbytes)
    return int(column.nbytes) if isinstance(column, np.ndarray) else len(encode_json(column))


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """An array that nobody can change any more: itself when it is read-only already, else a read-only copy."""
    if not array.flags.writeable and array.flags.c_contiguous:
        return array
    copy = np.array(array, order="C", copy=True)
    copy.flags.writeable = False
    return copy


def slice_rows(column: Column, start: int, end: int) -> Column:
    """Rows `start` to `end` without a copy of the values."""
    if not isinstance(column, Ragged):
        return column[start:end]
    if start == 0 and end == len(column):
        return column
    offsets = column.offsets[start : end + 1]
    return Ragged(column.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def take_rows(column: Column, rows: Sequence[int]) -> Column:
    """The rows at these indices, in this order, as a copy."""
    if isinstance(column, list):
        return [column[row] for row in rows]
    if isinstance(column, np.ndarray):
        return column[list(rows)]
    lengths = column.offsets[1:] - column.offsets[:-1]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths[list(rows)], out=offsets[1:])
    return Ragged(np.concatenate([column.values[:0], *(column[row] for row in rows)]), offsets)


def join(parts: Sequence[Column]) -> Column:
    """The rows of all parts (at least one, of one kind and dtype) one after another. Arrays are always copied."""
    first = parts[0]
    if isinstance(first, Ragged):
        ragged = [part for part in parts if isinstance(part, Ragged)]
        offsets = np.zeros(sum(len(part) for part in ragged) + 1, np.int64)
        row, end = 1, 0
        for part in ragged:
            offsets[row : row + len(part)] = part.offsets[1:]
            offsets[row : row + len(part)] += end
            row, end = row + len(part), end + int(part.offsets[-1])
        return Ragged(np.concatenate([part.values for part in ragged]), offsets)
    if isinstance(first, np.ndarray):
        return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    return [value for part in parts if isinstance(part, list) for value in part]


def is_same(one: Column, other: Column) -> bool:
    """Whether two columns hold the same bytes (a NaN equals itself)."""
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        return _is_same_array(one.values, other.values) and np.array_equal(one.offsets, other.offsets)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return _is_same_array(one, other)
    return isinstance(one, list) and isinstance(other, list) and encode_json(one) == encode_json(other)


def _is_same_array(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
