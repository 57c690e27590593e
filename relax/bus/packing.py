"""Columns as a description and raw buffers, for messages and for files. Nothing is pickled.

["ragged", dtype, tail, where values are, where offsets are]    ["dense", dtype, shape, where]    ["json", values]
["lent", pid, fd, inode, offset, dtype, shape]: in messages, an array that stays where it lies (`relax/shared_arrays.py`)
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.errors import BusError, StaleHandle
from relax.shared_arrays import Loan, borrow, lend
from relax.types import Column, Ragged

_LENT = "lent"
Bytes = NDArray[np.uint8]
Place = Callable[[NDArray[Any]], Any]
"""Stores an array's bytes and says where, in msgpack values."""
Fetch = Callable[[Any], Bytes]
"""The bytes at such a place, uint8 [n]."""


def pack(column: Column, place: Place) -> list[Any]:
    """The description of a column, whose arrays `place` has stored."""
    if isinstance(column, Ragged):
        values = np.ascontiguousarray(column.values)
        return ["ragged", values.dtype.str, list(values.shape[1:]), place(values), place(np.ascontiguousarray(column.offsets))]
    if isinstance(column, np.ndarray):
        return ["dense", column.dtype.str, list(column.shape), place(np.ascontiguousarray(column))]
    return ["json", column]


def unpack(packed: list[Any], fetch: Fetch) -> Column:
    """The column of a description; arrays are views of what `fetch` returns."""
    try:
        kind = packed[0]
        if kind == "json":
            return list(packed[1])
        dtype = np.dtype(packed[1])
        if dtype.hasobject:
            raise BusError(f"a packed column of dtype {dtype} is refused")
        if kind == "dense":
            dense: NDArray[Any] = fetch(packed[3]).view(dtype).reshape(packed[2])
            return dense
        if kind == "ragged":
            values = fetch(packed[3]).view(dtype)
            return Ragged(values.reshape((-1, *packed[2])) if packed[2] else values, fetch(packed[4]).view(np.int64))
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise BusError(f"a packed column is malformed: {error}") from error
    raise BusError(f"a packed column has the unknown kind {kind!r}")


def pack_array(array: NDArray[Any], place: Place) -> list[Any]:
    """As a dense column; lent where it lies in memory that others can read as well."""
    loan = lend(array)
    return pack(array, place) if loan is None else [_LENT, *loan]


def is_lent(packed: list[Any]) -> bool:
    """Whether the array of this description stays where it lies."""
    return bool(packed) and packed[0] == _LENT


def unpack_arrays(packed: Mapping[str, list[Any]], fetch: Fetch) -> dict[str, NDArray[Any]]:
    """Arrays by name, each packed as a dense column is, or lent. Raises `StaleHandle` for one whose owner has let it go."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, description in packed.items():
        array = _borrowed(name, description) if is_lent(description) else unpack(description, fetch)
        if not isinstance(array, np.ndarray):
            raise BusError(f"a packed array is a {description[0]} column")
        arrays[name] = array
    return arrays


def _borrowed(name: str, description: list[Any]) -> NDArray[Any]:
    try:
        return borrow(Loan(*description[1:]))
    except FileNotFoundError as error:
        raise StaleHandle(f"the shared array {name!r} was freed: {error}") from error
    except OSError as error:
        raise BusError(f"the shared array {name!r} cannot be mapped: {error}") from error
    except (ValueError, TypeError) as error:
        raise BusError(f"a lent array is malformed: {error}") from error
