"""The transfer queue from another process: `bus = await connect(address)` has the whole face.

Every call has a deadline. When the core's process dies, or answers nothing for `SILENCE_BEATS` seconds, every call under
way and every later one raises `BusGone`. What a lease brought stays valid after it is acknowledged: columns are copied on the
way in and on the way out; a group's shared arrays too, unless they lie in memory that all processes can map.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax.bus.arena import ArenaView
from relax.bus.calls import Calls
from relax.bus.columns import join
from relax.bus.packing import Bytes, Fetch, is_lent, pack, pack_array, unpack, unpack_arrays
from relax.bus.schema import check_column, check_shared
from relax.bus.transfer_queue import Lease, Ticket
from relax.bus.wire import INLINE, INLINE_LIMIT, Payload, part
from relax.errors import StaleHandle, WaitTimeout
from relax.types import Column, WeightManifest


async def connect(address: str, *, name: str = "", wait_s: float = 10.0, drop: Callable[[], bool] | None = None) -> "BusClient":
    """A client of the queue at `address`; `name` says who it is. Raises `BusGone` when nobody answers in `wait_s`.

    `drop`: for rehearsals, asked for each message that goes out or comes in; true loses it.
    """
    client = BusClient(address, name, drop=drop)
    await client.open(wait_s)
    return client


class BusClient:
    """A `TransferQueue` over a socket. Use it from the event loop that `connect` ran in."""

    def __init__(self, address: str, name: str, *, drop: Callable[[], bool] | None = None) -> None:
        self.address, self.name = address, name
        self._calls = Calls(address, name, drop)
        self._call = self._calls.call
        self._arena = ArenaView()
        self._spare: list[Any] | None = None  # a block of the core's memory that is ours to write

    async def open(self, wait_s: float) -> None:
        """Connects; called by `connect`."""
        await self._calls.open(wait_s)

    # -- admission ----------------------------------------------------------------------------------------------------
    async def admit(self, count: int, wait_s: float) -> list[Ticket]:
        tickets, _ = await self._call("admit", {"count": count}, wait_s=wait_s)
        return [Ticket(*ticket) for ticket in tickets]

    async def forfeit(self, issue: int, outcome: str, reason: str) -> None:
        await self._call("forfeit", {"issue": issue, "outcome": outcome, "reason": reason})

    # -- rows ---------------------------------------------------------------------------------------------------------
    async def put_group(
        self, issue: int, columns: Mapping[str, Column], wait_s: float, shared: Mapping[str, NDArray[Any]] | None = None
    ) -> list[int]:
        start = asyncio.get_running_loop().time()
        shared = shared or {}
        packed, payload = _pack(f"group {issue}", columns)
        check_shared(f"group {issue}", shared)
        arrays = {name: pack_array(array, payload.place) for name, array in shared.items()}
        lent = sum(shared[name].nbytes for name, packed_array in arrays.items() if is_lent(packed_array))
        known, block, beside = await self._share(payload, issue, wait_s, lent)
        if known is not None:
            return known
        left = max(0.0, wait_s - (asyncio.get_running_loop().time() - start))
        arguments = {"issue": issue, "columns": packed, "shared": arrays, "block": block}
        (row_ids, spare), _ = await self._call("put_group", arguments, beside, wait_s=left)
        self._spare = spare or self._spare
        return list(row_ids)

    async def write(self, row_ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        packed, payload = _pack("write", columns)
        _, block, beside = await self._share(payload, None, 0.0)
        arguments = {"row_ids": list(row_ids), "columns": packed, "block": block}
        spare, _ = await self._call("write", arguments, beside)
        self._spare = spare or self._spare

    async def claim(
        self,
        task: str,
        columns: Sequence[str],
        *,
        num_groups: int,
        wait_s: float,
        at_least: int = 1,
        step: int | None = None,
        consumer: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        shared: bool = False,
    ) -> Lease:
        arguments = {"task": task, "columns": list(columns), "num_groups": num_groups, "step": step}
        arguments |= {"at_least": at_least, "consumer": consumer, "rank": rank, "num_ranks": num_ranks, "shared": shared}
        answer, payload = await self._call("claim", arguments, wait_s=wait_s)
        lease_id, row_ids, group_ids, packed, paths, by_group = answer

        def fetch(where: Sequence[int]) -> Bytes:
            segment, offset, size = where
            return part(payload, where) if segment == INLINE else self._arena.view(paths[segment], offset, size)

        joined = {name: join([unpack(piece, fetch) for piece in parts]) for name, parts in packed.items()}
        try:
            arrays = {issue: _copied(parts, fetch) for issue, parts in by_group.items()}
        except StaleHandle as gone:  # the lease ended, as in a rewind, while its answer was on the way
            raise WaitTimeout(f"claim of {task}", f"groups that are still there: {gone}", 0.0) from gone
        return Lease(lease_id, task, tuple(row_ids), tuple(group_ids), joined, self._calls.lease_s, arrays)

    async def renew(self, lease_ids: Sequence[str]) -> None:
        await self._call("renew", {"lease_ids": list(lease_ids)})

    async def ack(self, lease_ids: Sequence[str], *, step: int | None = None) -> None:
        await self._call("ack", {"lease_ids": list(lease_ids), "step": step})

    async def release(self, lease_id: str) -> None:
        await self._call("release", {"lease_id": lease_id})

    async def drop(self, row_ids: Sequence[int], reason: str, *, reissue: bool = False) -> None:
        await self._call("drop", {"row_ids": list(row_ids), "reason": reason, "reissue": reissue})

    async def rewind(self, step: int) -> None:
        await self._call("rewind", {"step": step})

    # -- policy versions ----------------------------------------------------------------------------------------------
    async def subscribe(self, subscriber: str, *, takes_turns: bool = False) -> None:
        """As the face says; the subscription ends with this client."""
        await self._call("subscribe", {"subscriber": subscriber, "takes_turns": takes_turns})

    async def unsubscribe(self, subscriber: str) -> None:
        await self._call("unsubscribe", {"subscriber": subscriber})

    async def announce(self, manifest: WeightManifest) -> None:
        await self._call("announce", {"manifest": msgspec.to_builtins(manifest)})

    async def next_manifest(self, subscriber: str, wait_s: float) -> WeightManifest | None:
        manifest, _ = await self._call("next_manifest", {"subscriber": subscriber}, wait_s=wait_s)
        return None if manifest is None else msgspec.convert(manifest, WeightManifest)

    async def recall(self, wait_s: float) -> None:
        await self._call("recall", {}, wait_s=wait_s)

    async def gave_up(self, subscriber: str) -> None:
        await self._call("gave_up", {"subscriber": subscriber})

    async def hold_engines(self, holder: str, wait_s: float) -> None:
        await self._call("hold_engines", {"holder": holder}, wait_s=wait_s)

    async def let_go(self, holder: str) -> None:
        await self._call("let_go", {"holder": holder})

    async def acknowledge(self, subscriber: str, version: int) -> None:
        await self._call("acknowledge", {"subscriber": subscriber, "version": version})

    async def reject(self, subscriber: str, version: int, reason: str) -> None:
        await self._call("reject", {"subscriber": subscriber, "version": version, "reason": reason})

    async def wait_acknowledged(self, version: int, wait_s: float) -> None:
        await self._call("wait_acknowledged", {"version": version}, wait_s=wait_s)

    # -- observation --------------------------------------------------------------------------------------------------
    async def emit(self, event: Mapping[str, Any]) -> None:
        await self._call("emit", {"event": dict(event)})

    async def events(self, after: int, wait_s: float) -> list[dict[str, Any]]:
        found, _ = await self._call("events", {"after": after}, wait_s=wait_s)
        return list(found)

    async def stats(self) -> dict[str, Any]:
        found, _ = await self._call("stats", {})
        return dict(found)

    # -- life ---------------------------------------------------------------------------------------------------------
    async def snapshot(self, path: str) -> None:
        await self._call("snapshot", {"path": path})

    async def close(self) -> None:
        """Says goodbye: what this client holds goes back to the queue at once. May be called again."""
        await self._calls.close()
        self._arena.close()

    # -- inside -------------------------------------------------------------------------------------------------------
    async def _share(
        self, payload: Payload, issue: int | None, wait_s: float, lent: int = 0
    ) -> tuple[list[int] | None, int | None, bytes]:
        """(None, None, bytes) for a small payload; (None, block, b"") once a large one is in the core's memory;
        (row ids, None, b"") when the issue was put already. `lent`: bytes of the group that lie elsewhere."""
        if payload.size <= INLINE_LIMIT:
            return None, None, payload.join()
        block, self._spare = self._spare, None
        if block is None or not payload.size <= block[1] <= 2 * payload.size:
            if block is not None:
                await self._call("forget", {"block": block[0]})
            wanted = {"size": payload.size, "lent": lent, "issue": issue}
            (known, block), _ = await self._call("extent", wanted, wait_s=wait_s)
            if known is not None:
                return list(known), None, b""
        key, size, path, offset = block
        payload.write(self._arena.view(path, offset, size))
        return None, key, b""


def _pack(where: str, columns: Mapping[str, Column]) -> tuple[dict[str, Any], Payload]:
    """Descriptions of the columns, and the arrays that they name."""
    payload = Payload()
    for name, column in columns.items():
        check_column(f"{where}: column {name!r}", column)
    return {name: pack(column, payload.place) for name, column in columns.items()}, payload


def _copied(packed: Mapping[str, list[Any]], fetch: Fetch) -> dict[str, NDArray[Any]]:
    """Shared arrays that outlive their lease: copies of those in the core's memory, and as they are those that are lent."""
    found = unpack_arrays(packed, fetch)
    arrays = {name: array if is_lent(packed[name]) else np.array(array) for name, array in found.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
