"""The core's state as a file: a msgpack header, then raw buffers; written beside and renamed, so that it is whole or absent.

8 bytes "RELAXBUS" | 8 bytes header length | header | buffers
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax.bus.claims import Claims
from relax.bus.columns import encode_json
from relax.bus.packing import Bytes, pack, unpack
from relax.bus.rows import Rows
from relax.bus.tickets import Tickets
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, CheckpointError
from relax.types import Column

_MAGIC, _FORMAT = b"RELAXBUS", 1


class SavedGroup(msgspec.Struct, frozen=True):
    """A group with rows. `done`: tasks that need not have it again."""

    issue: int
    version: int
    columns: dict[str, list[Any]]
    done: list[str]


class SavedState(msgspec.Struct, frozen=True):
    """What survives. Leases, waits, receivers of weights and events do not: their owners come back on their own."""

    format: int
    prompts_per_step: int
    next_issue: int
    in_flight: list[int]
    fates: dict[str, int]
    steps: dict[str, int]  # task -> first step that is not trained
    ages: dict[int, int]
    groups: list[SavedGroup]


def capture(limits: QueueLimits, tickets: Tickets, rows: Rows, claims: Claims) -> tuple[SavedState, list[NDArray[Any]]]:
    """The state now and its buffers, which are immutable and kept alive by the list."""
    buffers: list[NDArray[Any]] = []
    end = 0

    def place(array: NDArray[Any]) -> tuple[int, int]:
        nonlocal end
        buffers.append(array)
        end += array.nbytes
        return end - array.nbytes, array.nbytes

    groups = [
        SavedGroup(g.issue, g.version, {name: pack(column, place) for name, column in g.columns.items()}, sorted(g.done))
        for g in rows.groups.values()
    ]
    steps = {name: task.places.next_step for name, task in claims.tasks.items() if task.places is not None}
    in_flight = sorted([*tickets.in_flight, *tickets.again])
    fates = {str(fate): count for fate, count in tickets.fates.items()}
    state = SavedState(_FORMAT, limits.prompts_per_step, tickets.next_issue, in_flight, fates, steps, dict(claims.ages), groups)
    return state, buffers


def write(path: str, state: SavedState, buffers: list[NDArray[Any]]) -> None:
    """Writes the file atomically; raises `CheckpointError` with the cause, and leaves the old file, when it cannot."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        header = encode_json(msgspec.to_builtins(state))
        with beside.open("wb") as file:
            file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
            for array in buffers:
                file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: the transfer queue's snapshot cannot be written: {error}") from error


def read(path: str | Path) -> tuple[SavedState, list[dict[str, Column]]]:
    """The state and the columns of each of its groups."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: the transfer queue's snapshot cannot be read: {error}") from error
    if content[:8] != _MAGIC:
        raise CheckpointError(f"{path}: not a snapshot of the transfer queue")
    start = 16 + int.from_bytes(content[8:16], "little")
    try:
        state = msgspec.msgpack.decode(content[16:start], type=SavedState)

        def fetch(where: Any) -> Bytes:
            offset, size = where
            return np.frombuffer(content, np.uint8, size, start + offset)

        columns = [{name: unpack(packed, fetch) for name, packed in group.columns.items()} for group in state.groups]
    except (msgspec.MsgspecError, ValueError, BusError) as error:
        raise CheckpointError(f"{path}: the transfer queue's snapshot is damaged: {error}") from error
    if state.format != _FORMAT:
        raise CheckpointError(f"{path}: snapshot format {state.format}; this version reads format {_FORMAT}")
    return state, columns
