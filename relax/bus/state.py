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
from relax.bus.departures import Departures
from relax.bus.packing import Bytes, Fetch, pack, unpack, unpack_arrays
from relax.bus.rows import Rows
from relax.bus.tickets import Tickets
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError, CheckpointError
from relax.types import Column

_MAGIC, _FORMAT = b"RELAXBUS", 3
_READABLE = (2, 3)  # 2 knew no shared arrays

Columns = dict[str, Column]
Arrays = dict[str, NDArray[Any]]


class SavedGroup(msgspec.Struct, frozen=True):
    """A group with rows. `done`: tasks that need not have it again; `shared`: arrays, packed as columns are."""

    issue: int
    prompt: int
    version: int
    columns: dict[str, list[Any]]
    done: list[str]
    shared: dict[str, list[Any]] = {}


class SavedState(msgspec.Struct, frozen=True):
    """What survives. Leases, waits, receivers of weights and events do not: their owners come back on their own."""

    format: int
    prompts_per_step: int
    next_issue: int
    next_prompt: int
    in_flight: dict[int, int]  # issue -> prompt
    to_reissue: list[int]  # prompts
    fates: dict[str, int]
    steps: dict[str, int]  # task -> first step that is not trained
    ages: dict[int, int]
    counters: dict[str, int]  # dropped, masked, surplus, reissued, rewinds
    groups: list[SavedGroup]


class _Format(msgspec.Struct, frozen=True):
    format: int


def capture(
    limits: QueueLimits, tickets: Tickets, rows: Rows, claims: Claims, departures: Departures
) -> tuple[SavedState, list[NDArray[Any]]]:
    """The state now and its buffers, which are immutable and kept alive by the list."""
    buffers: list[NDArray[Any]] = []
    end = 0

    def place(array: NDArray[Any]) -> tuple[int, int]:
        nonlocal end
        buffers.append(array)
        end += array.nbytes
        return end - array.nbytes, array.nbytes

    prompts = tickets.prompts
    state = SavedState(
        format=_FORMAT,
        prompts_per_step=limits.prompts_per_step,
        next_issue=tickets.next_issue,
        next_prompt=tickets.numbers.next_prompt,
        in_flight={issue: prompts[issue] for issue in sorted([*tickets.in_flight, *tickets.again])},
        to_reissue=sorted(tickets.numbers.waiting),
        fates={str(fate): count for fate, count in tickets.fates.items()},
        steps={name: task.places.next_step for name, task in claims.tasks.items() if task.places is not None},
        ages=dict(claims.ages),
        counters={
            "dropped": departures.num_dropped,
            "masked": claims.num_masked,
            "surplus": departures.num_surplus,
            "reissued": tickets.numbers.num_reissued,
            "rewinds": departures.num_rewinds,
        },
        groups=[
            SavedGroup(
                g.issue,
                prompts[g.issue],
                g.version,
                {name: pack(column, place) for name, column in g.columns.items()},
                sorted(g.done),
                {name: pack(array, place) for name, array in g.shared.items()},
            )
            for g in rows.groups.values()
        ],
    )
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


def read(path: str | Path) -> tuple[SavedState, list[tuple[Columns, Arrays]]]:
    """The state, and of each of its groups the columns and the shared arrays."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: the transfer queue's snapshot cannot be read: {error}") from error
    if content[:8] != _MAGIC:
        raise CheckpointError(f"{path}: not a snapshot of the transfer queue")
    start = 16 + int.from_bytes(content[8:16], "little")
    try:
        found = msgspec.msgpack.decode(content[16:start], type=_Format).format
        if found not in _READABLE:
            raise CheckpointError(
                f"{path}: a snapshot of format {found}, and this version of relax reads {' and '.join(map(str, _READABLE))}: "
                "finish the run with the version that wrote it, or begin a new one"
            )
        state = msgspec.msgpack.decode(content[16:start], type=SavedState)

        def fetch(where: Any) -> Bytes:
            offset, size = where
            # each array gets memory of its own, aligned, which goes with it; views would keep the whole file
            copy = np.frombuffer(content, np.uint8, size, start + offset).copy()
            copy.flags.writeable = False
            return copy

        contents = [(_columns(group, fetch), unpack_arrays(group.shared, fetch)) for group in state.groups]
    except (msgspec.MsgspecError, ValueError, BusError) as error:
        raise CheckpointError(f"{path}: the transfer queue's snapshot is damaged: {error}") from error
    return state, contents


def _columns(group: SavedGroup, fetch: Fetch) -> Columns:
    return {name: unpack(packed, fetch) for name, packed in group.columns.items()}
