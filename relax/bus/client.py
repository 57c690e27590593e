"""The transfer queue from another process: `bus = await connect(address)` has the whole face.

Every call has a deadline. When the core's process dies, or answers nothing for `SILENCE_BEATS` seconds, every call under
way and every later one raises `BusGone`. Arrays are copied on the way in and on the way out: what a lease brought stays
valid after it is acknowledged.
"""

import asyncio
import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from relax.bus.address import socket_path
from relax.bus.arena import ArenaView
from relax.bus.columns import join
from relax.bus.packing import Bytes, pack, unpack
from relax.bus.processes import ProcessId, this_process
from relax.bus.schema import check_column
from relax.bus.transfer_queue import Lease, Ticket
from relax.bus.wire import INLINE, INLINE_LIMIT, NOTICE, Channel, Payload, decode, decode_error, encode, part
from relax.errors import BusError, BusGone
from relax.types import Column, WeightManifest

BEAT_S = 1.0
SILENCE_BEATS = 8
ANSWER_S = 60.0
"""Longest time for an answer, beyond what the call itself may wait: a living core answers in milliseconds."""
_MAX_WAIT_S = 1e7


async def connect(address: str, *, name: str = "", wait_s: float = 10.0) -> "BusClient":
    """A client of the queue at `address`; `name` says who it is. Raises `BusGone` when nobody answers in `wait_s`."""
    client = BusClient(address, name)
    await client.open(wait_s)
    return client


class BusClient:
    """A `TransferQueue` over a socket. Use it from the event loop that `connect` ran in."""

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self._numbers = itertools.count(NOTICE + 1)
        self._pending: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._arena = ArenaView()
        self._spare: list[Any] | None = None  # a block of the core's memory that is ours to write
        self._gone: BusGone | None = None
        self._incarnation = -1
        self._silent_beats = 0

    async def open(self, wait_s: float) -> None:
        """Connects; called by `connect`."""
        socket_path(self.address)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"\x01" + secrets.token_bytes(16))
        socket.connect(self.address)
        self._channel = Channel(socket, self._receive)
        try:
            async with asyncio.timeout(wait_s):
                answer, _ = await self._call("hello", {"name": self.name, "process": this_process()})
        except TimeoutError as error:
            self._channel.close()
            raise BusGone(f"no transfer queue answers at {self.address} within {wait_s:g} s") from error
        self._incarnation, self._lease_s = answer["incarnation"], answer["lease_s"]
        self._server = ProcessId(*answer["process"])
        self._heart = asyncio.create_task(self._beat(), name="relax-bus-heart")

    # -- admission ----------------------------------------------------------------------------------------------------
    async def admit(self, count: int, wait_s: float) -> list[Ticket]:
        tickets, _ = await self._call("admit", {"count": count}, wait_s=wait_s)
        return [Ticket(*ticket) for ticket in tickets]

    async def forfeit(self, issue: int, outcome: str, reason: str) -> None:
        await self._call("forfeit", {"issue": issue, "outcome": outcome, "reason": reason})

    # -- rows ---------------------------------------------------------------------------------------------------------
    async def put_group(self, issue: int, columns: Mapping[str, Column], wait_s: float) -> list[int]:
        start = asyncio.get_running_loop().time()
        packed, payload = _pack(f"group {issue}", columns)
        known, block, beside = await self._share(payload, issue, wait_s)
        if known is not None:
            return known
        left = max(0.0, wait_s - (asyncio.get_running_loop().time() - start))
        arguments = {"issue": issue, "columns": packed, "block": block}
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
        step: int | None = None,
        consumer: str = "",
        rank: int = 0,
        num_ranks: int = 1,
    ) -> Lease:
        arguments = {"task": task, "columns": list(columns), "num_groups": num_groups, "step": step}
        arguments |= {"consumer": consumer, "rank": rank, "num_ranks": num_ranks}
        answer, payload = await self._call("claim", arguments, wait_s=wait_s)
        lease_id, row_ids, group_ids, packed, paths = answer

        def fetch(where: Sequence[int]) -> Bytes:
            segment, offset, size = where
            return part(payload, where) if segment == INLINE else self._arena.view(paths[segment], offset, size)

        joined = {name: join([unpack(piece, fetch) for piece in parts]) for name, parts in packed.items()}
        return Lease(lease_id, task, tuple(row_ids), tuple(group_ids), joined, self._lease_s)

    async def ack(self, lease_ids: Sequence[str], *, step: int | None = None) -> None:
        await self._call("ack", {"lease_ids": list(lease_ids), "step": step})

    async def release(self, lease_id: str) -> None:
        await self._call("release", {"lease_id": lease_id})

    async def drop(self, row_ids: Sequence[int], reason: str) -> None:
        await self._call("drop", {"row_ids": list(row_ids), "reason": reason})

    # -- policy versions ----------------------------------------------------------------------------------------------
    async def subscribe(self, subscriber: str) -> None:
        """As the face says; the subscription ends with this client."""
        await self._call("subscribe", {"subscriber": subscriber})

    async def unsubscribe(self, subscriber: str) -> None:
        await self._call("unsubscribe", {"subscriber": subscriber})

    async def announce(self, manifest: WeightManifest) -> None:
        await self._call("announce", {"manifest": msgspec.to_builtins(manifest)})

    async def next_manifest(self, subscriber: str, after: int, wait_s: float) -> WeightManifest:
        manifest, _ = await self._call("next_manifest", {"subscriber": subscriber, "after": after}, wait_s=wait_s)
        return msgspec.convert(manifest, WeightManifest)

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
        if self._gone is None:
            try:
                async with asyncio.timeout(2.0):
                    await self._call("bye", {})
            except (TimeoutError, BusError):
                pass  # the core is gone, or will find out that this client is
            self._lose("this client of the transfer queue is closed")
        self._heart.cancel()
        await asyncio.gather(self._heart, return_exceptions=True)
        self._channel.close()
        self._arena.close()

    # -- inside -------------------------------------------------------------------------------------------------------
    async def _call(
        self, operation: str, arguments: dict[str, Any], payload: bytes = b"", *, wait_s: float | None = None
    ) -> tuple[Any, bytes]:
        if self._gone is not None:
            raise BusGone(str(self._gone))
        if wait_s is not None:
            arguments["wait_s"] = wait_s = max(0.0, min(wait_s, _MAX_WAIT_S)) if not math.isnan(wait_s) else 0.0
        try:
            number = next(self._numbers)
            header = encode(number, self._incarnation, operation, arguments)
        except (TypeError, OverflowError) as error:
            raise BusError(f"{operation}: {error}; only JSON values travel") from error
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, bytes]] = loop.create_future()
        self._pending[number] = future
        limit = ANSWER_S + (wait_s or 0.0)
        timer = loop.call_later(limit, self._give_up, number, operation, limit)
        self._channel.send([header, payload] if payload else [header])
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            timer.cancel()
            self._pending.pop(number, None)

    def _give_up(self, number: int, operation: str, limit: float) -> None:
        self._cancel(number)
        future = self._pending.get(number)
        if future is not None and not future.done():
            future.set_exception(BusGone(f"{operation}: the transfer queue at {self.address} gave no answer in {limit:g} s"))

    def _cancel(self, number: int) -> None:
        if self._gone is None:
            self._channel.send([encode(next(self._numbers), self._incarnation, "cancel", {"number": number})])

    def _receive(self, frames: list[bytes]) -> None:
        self._silent_beats = 0
        number, ok, result = decode(frames[0])
        if number == NOTICE:
            self._lose(str(decode_error(result)))
            return
        future = self._pending.get(number)
        if future is None or future.done():
            return
        if ok:
            future.set_result((result, frames[1] if len(frames) > 1 else b""))
        else:
            future.set_exception(decode_error(result))

    async def _beat(self) -> None:
        """Counts beats without an answer, not seconds: a loop that was held up by its own work must not see a dead core."""
        while self._gone is None:
            self._channel.send([encode(next(self._numbers), self._incarnation, "ping", {})])
            await asyncio.sleep(BEAT_S)
            self._silent_beats += 1
            if not self._server.is_alive:
                self._lose(f"the transfer queue's process {self._server.pid} died")
            elif self._silent_beats > SILENCE_BEATS:
                self._lose(f"the transfer queue at {self.address} has said nothing for {SILENCE_BEATS * BEAT_S:g} s")

    def _lose(self, why: str) -> None:
        if self._gone is None:
            self._gone = BusGone(why)
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(BusGone(why))

    async def _share(self, payload: Payload, issue: int | None, wait_s: float) -> tuple[list[int] | None, int | None, bytes]:
        """(None, None, bytes) for a small payload; (None, block, b"") once a large one is in the core's memory;
        (row ids, None, b"") when the issue was put already."""
        if payload.size <= INLINE_LIMIT:
            return None, None, payload.join()
        block, self._spare = self._spare, None
        if block is None or not payload.size <= block[1] <= 2 * payload.size:
            if block is not None:
                await self._call("forget", {"block": block[0]})
            (known, block), _ = await self._call("extent", {"size": payload.size, "issue": issue}, wait_s=wait_s)
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
