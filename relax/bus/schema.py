"""Columns of the queue: which kinds there are, and what is refused when a row is put or written.

A column is ragged (one array per row, `values` and `offsets`), dense (`[N, ...]`, one entry per row) or a list of JSON
values. The first time a name is used fixes its kind and dtype for the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax.bus.columns import encode_json, frozen, kind_of, num_bytes
from relax.errors import BusError
from relax.types import Column, Ragged

# Entry t speaks of token t: these have the lengths of `tokens`, row by row.
PER_TOKEN = frozenset(
    {
        *("loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns"),
        *("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
    }
)
REQUIRED = ("tokens", "versions")
REQUIRED_TO_MASK = (*REQUIRED, "newest_versions")
"""Of groups that stay as long as their newest tokens are young enough."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Kind, dtype and the dimensions after the first of a column; what two uses of a name must agree on."""

    kind: str
    dtype: str = ""
    tail: tuple[int, ...] = ()

    @staticmethod
    def of(column: Column) -> "Shape":
        if isinstance(column, list):
            return Shape("json")
        array = column.values if isinstance(column, Ragged) else column
        return Shape(kind_of(column), array.dtype.str, array.shape[1:])

    def empty(self) -> Column:
        """A column of this shape without rows."""
        if self.kind == "json":
            return []
        values: NDArray[Any] = np.zeros((0, *self.tail), np.dtype(self.dtype))
        return Ragged(values, np.zeros(1, np.int64)) if self.kind == "ragged" else values

    def __str__(self) -> str:
        return (
            self.kind if self.kind == "json" else f"{self.kind} {np.dtype(self.dtype).name}{[*self.tail] if self.tail else ''}"
        )


class Content(NamedTuple):
    """What a group consists of, checked and frozen."""

    columns: dict[str, Column]
    shared: dict[str, NDArray[Any]]
    num_rows: int
    num_bytes: int


class Schema:
    """The columns of one run, learnt from their first use. `required`: those that every group has."""

    def __init__(self, required: tuple[str, ...] = REQUIRED) -> None:
        self.required = required
        self.shapes: dict[str, Shape] = {}

    def check_group(self, issue: int, columns: Mapping[str, Column], shared: Mapping[str, NDArray[Any]]) -> Content:
        """The content of a new group; raises `BusError` that names the column or the shared array."""
        where = f"group {issue}"
        for name in self.required:
            if name not in columns:
                raise BusError(f"{where}: column {name!r} is missing; a group needs {' and '.join(self.required)}")
        checked, rows, size = self.check(where, columns)
        for name in self.required:
            versions = checked[name]
            if name == "tokens":
                continue
            if not isinstance(versions, np.ndarray) or versions.ndim != 1 or versions.dtype.kind not in "iu":
                raise BusError(f"{where}: column {name!r} must hold one whole number per row, not {Shape.of(versions)}")
        if rows == 0:
            raise BusError(f"{where}: no rows; a group that has none is forfeited")
        lengths = token_lengths(checked["tokens"])
        for name in PER_TOKEN & checked.keys():
            check_lengths(where, name, checked[name], lengths)
        check_shared(where, shared)
        arrays = {name: frozen(array) for name, array in shared.items()}
        return Content(checked, arrays, rows, size + sum(array.nbytes for array in arrays.values()))

    def check(self, where: str, columns: Mapping[str, Column]) -> tuple[dict[str, Column], int, int]:
        """(frozen columns, number of rows, bytes); raises `BusError` for columns that are malformed or do not agree."""
        if not columns:
            raise BusError(f"{where}: no columns")
        for name, column in columns.items():
            check_column(f"{where}: column {name!r}", column)
        checked = {name: freeze(column) for name, column in columns.items()}
        counts = {name: len(column) for name, column in checked.items()}
        if len(set(counts.values())) > 1:
            raise BusError(f"{where}: the columns disagree about the number of rows: {counts}")
        for name, column in checked.items():
            shape = Shape.of(column)
            known = self.shapes.get(name, shape)
            if shape != known:
                raise BusError(f"{where}: column {name!r} is {shape}, but it was {known} before")
        return checked, next(iter(counts.values())), sum(num_bytes(column) for column in checked.values())

    def learn(self, columns: Mapping[str, Column]) -> None:
        """Fixes the shapes of columns that were accepted."""
        for name, column in columns.items():
            if name not in self.shapes:
                self.shapes[name] = Shape.of(column)


def token_lengths(tokens: Column) -> NDArray[np.int64]:
    """Number of tokens of each row [N]."""
    if isinstance(tokens, Ragged):
        return np.diff(tokens.offsets)
    return np.array([len(row) for row in tokens] if isinstance(tokens, list) else [tokens[0].size] * len(tokens), np.int64)


def check_lengths(where: str, name: str, column: Column, lengths: NDArray[np.int64]) -> None:
    """Raises `BusError` when a per-token column's rows do not have the lengths of `tokens`."""
    found = token_lengths(column) if isinstance(column, Ragged) else None
    if found is not None and not np.array_equal(found, lengths):
        row = int(np.flatnonzero(found != lengths)[0])
        raise BusError(f"{where}: row {row} of column {name!r} has {found[row]} entries for {lengths[row]} tokens")


def check_column(where: str, column: Column) -> None:
    """Raises `BusError` for a column that is malformed in itself."""
    if isinstance(column, Ragged):
        values, offsets = column.values, column.offsets
        if not isinstance(values, np.ndarray) or not isinstance(offsets, np.ndarray):
            raise BusError(f"{where}: ragged values and offsets must be numpy arrays")
        _check_dtype(where, values)
        if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) < 1 or values.ndim < 1:
            raise BusError(f"{where}: ragged offsets must be int64 [N + 1] over values [T, ...]")
        if offsets[0] != 0 or offsets[-1] != len(values) or np.any(offsets[1:] < offsets[:-1]):
            raise BusError(f"{where}: ragged offsets must rise from 0 to {len(values)}")
    elif isinstance(column, np.ndarray):
        _check_dtype(where, column)
        if column.ndim < 1:
            raise BusError(f"{where}: a dense column needs one entry per row")
    elif isinstance(column, list):
        try:
            encode_json(column)
        except (TypeError, OverflowError) as error:
            raise BusError(f"{where}: {error}; a list column holds JSON values") from error
    else:
        raise BusError(f"{where}: {type(column).__name__} is not a column; use Ragged, a numpy array or a list of JSON values")


def check_shared(where: str, shared: Mapping[str, NDArray[Any]]) -> None:
    """Raises `BusError` for a shared array that is none."""
    for name, array in shared.items():
        if not isinstance(array, np.ndarray):
            raise BusError(f"{where}: {type(array).__name__} cannot be shared as {name!r}; use a numpy array")
        _check_dtype(f"{where}: shared array {name!r}", array)


def freeze(column: Column) -> Column:
    """The column with arrays that nobody can change any more; copied unless they are read-only."""
    if isinstance(column, Ragged):
        return Ragged(frozen(column.values), frozen(column.offsets))
    return frozen(column) if isinstance(column, np.ndarray) else list(column)


def _check_dtype(where: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in "biuf":
        raise BusError(f"{where}: dtype {array.dtype} cannot travel; use numbers or booleans, or a list of JSON values")
