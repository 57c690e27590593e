"""The calls that a client may make, each a few lines between a message and the core."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np

from relax.bus.arena import Arena
from relax.bus.claim import Claim
from relax.bus.columns import join
from relax.bus.core import Core, rows_and_groups
from relax.bus.groups import Group
from relax.bus.packing import Bytes, Fetch, pack, pack_array, unpack, unpack_arrays
from relax.bus.sessions import Session
from relax.bus.wire import SPARE_LIMIT, Outbox, part
from relax.errors import BusError, StaleHandle
from relax.types import Column, Ragged, WeightManifest

Answer = tuple[Any, bytes]
Handler = Callable[..., Coroutine[Any, Any, Answer]]
_NOTHING: Answer = (None, b"")


class Operations:
    """By name: `waiting` ones may take long, `instant` ones never suspend.

    Called as `f(session, number, payload, **arguments)`.
    """

    def __init__(self, core: Core, arena: Arena) -> None:
        self._core, self._arena = core, arena
        self.waiting: dict[str, Handler] = {
            name: getattr(self, f"_{name}")
            for name in (
                *("admit", "extent", "put_group", "claim", "events", "snapshot"),
                *("next_manifest", "wait_acknowledged", "recall", "hold_engines"),
            )
        }
        self.instant: dict[str, Handler] = {
            name: getattr(self, f"_{name}")
            for name in (
                *("forfeit", "write", "renew", "ack", "release", "drop", "rewind", "forget"),
                *("subscribe", "unsubscribe", "announce", "acknowledge", "reject", "gave_up", "let_go"),
                *("emit", "stats"),
            )
        }

    # -- admission ----------------------------------------------------------------------------------------------------
    async def _admit(self, session: Session, number: int, payload: bytes, count: int, wait_s: float) -> Answer:
        tickets = await self._core.admit(count, wait_s)
        issues = [ticket.issue for ticket in tickets]
        session.tickets.update(issues)
        session.can_undo(number, lambda: session.return_tickets(issues))
        return [[ticket.issue, ticket.version, ticket.batch, ticket.prompt] for ticket in tickets], b""

    async def _forfeit(self, session: Session, number: int, payload: bytes, issue: int, outcome: str, reason: str) -> Answer:
        await self._core.forfeit(issue, outcome, reason)
        session.tickets.discard(issue)
        return _NOTHING

    # -- rows ---------------------------------------------------------------------------------------------------------
    async def _extent(
        self, session: Session, number: int, payload: bytes, size: int, lent: int, wait_s: float, issue: int | None
    ) -> Answer:
        """A block of shared memory for a payload; for a group, once it has room, with `lent` bytes that lie elsewhere.
        `[row ids]` if it was put already."""
        known = None if issue is None else await self._core.reserve(issue, size + lent, wait_s)
        if known is not None:
            return [known], b""
        block = self._block(session, size)
        session.can_undo(number, lambda: session.forget(block[0]))
        return [None, block], b""

    def _block(self, session: Session, size: int) -> list[Any]:
        """A block for the client to write into: [key, size, path of its file, offset]."""
        block = self._arena.allocate(size)
        return [session.keep(block), size, self._arena.paths[block.location.segment], block.location.offset]

    def _spare(self, session: Session, size: int) -> list[Any] | None:
        """A block for the client's next payload, which saves it a call; each client has one at most."""
        if not 0 < size <= SPARE_LIMIT or session.spare in session.blocks:
            return None
        block = self._block(session, size)
        session.spare = block[0]
        return block

    async def _forget(self, session: Session, number: int, payload: bytes, block: int) -> Answer:
        session.forget(block)
        return _NOTHING

    async def _put_group(
        self,
        session: Session,
        number: int,
        payload: bytes,
        issue: int,
        columns: dict[str, Any],
        shared: dict[str, Any],
        block: int | None,
        wait_s: float,
    ) -> Answer:
        size = session.size_of(block)
        fetch = self._fetch(session, payload, block)
        try:
            arrays = unpack_arrays(shared, fetch)
        except StaleHandle as error:  # to who waits for an answer that would mean that the ticket is void
            raise BusError(f"group {issue}: what its client lent is not to be found: {error}") from error
        row_ids = await self._core.put_group(issue, _unpack(columns, fetch), wait_s, arrays)
        session.tickets.discard(issue)
        return [row_ids, self._spare(session, size)], b""

    async def _write(
        self, session: Session, number: int, payload: bytes, row_ids: list[int], columns: dict[str, Any], block: int | None
    ) -> Answer:
        size = session.size_of(block)
        await self._core.write(row_ids, _unpack(columns, self._fetch(session, payload, block)))
        return self._spare(session, size), b""

    async def _claim(
        self,
        session: Session,
        number: int,
        payload: bytes,
        *,
        task: str,
        columns: list[str],
        num_groups: int,
        wait_s: float,
        at_least: int,
        step: int | None,
        consumer: str,
        rank: int,
        num_ranks: int,
        shared: bool,
    ) -> Answer:
        claim = Claim(task, frozenset(columns), num_groups, step, consumer or session.name, rank, num_ranks, at_least)
        held = await self._core.hold(claim, wait_s)
        lease_id = held.lease_id
        session.leases.add(lease_id)
        session.can_undo(number, lambda: session.return_lease(lease_id))  # keeps the name alive, not the rows
        outbox = Outbox(self._arena.locate)
        packed = {name: self._pack(name, held.groups, outbox) for name in columns}
        arrays = {group.issue: _pack_shared(group, outbox) for group in held.groups if group.shared} if shared else {}
        row_ids, group_ids = rows_and_groups(held)
        return [lease_id, row_ids, group_ids, packed, self._arena.paths, arrays], outbox.join()

    async def _renew(self, session: Session, number: int, payload: bytes, lease_ids: list[str]) -> Answer:
        await self._core.renew(lease_ids)
        return _NOTHING

    async def _ack(self, session: Session, number: int, payload: bytes, lease_ids: list[str], step: int | None) -> Answer:
        await self._core.ack(lease_ids, step=step)
        session.leases.difference_update(lease_ids)
        return _NOTHING

    async def _release(self, session: Session, number: int, payload: bytes, lease_id: str) -> Answer:
        await self._core.release(lease_id)
        session.leases.discard(lease_id)
        return _NOTHING

    async def _drop(
        self, session: Session, number: int, payload: bytes, row_ids: list[int], reason: str, reissue: bool
    ) -> Answer:
        await self._core.drop(row_ids, reason, reissue=reissue)
        return _NOTHING

    async def _rewind(self, session: Session, number: int, payload: bytes, step: int) -> Answer:
        await self._core.rewind(step)
        return _NOTHING

    # -- policy versions ----------------------------------------------------------------------------------------------
    async def _subscribe(self, session: Session, number: int, payload: bytes, subscriber: str, takes_turns: bool) -> Answer:
        await self._core.subscribe(subscriber, takes_turns=takes_turns)
        session.subscriptions.take(subscriber)
        return _NOTHING

    async def _unsubscribe(self, session: Session, number: int, payload: bytes, subscriber: str) -> Answer:
        await self._core.unsubscribe(subscriber)
        session.subscriptions.discard(subscriber)
        return _NOTHING

    async def _announce(self, session: Session, number: int, payload: bytes, manifest: dict[str, Any]) -> Answer:
        try:
            await self._core.announce(msgspec.convert(manifest, WeightManifest))
        except msgspec.ValidationError as error:
            raise BusError(f"announce: not a manifest: {error}") from error
        return _NOTHING

    async def _next_manifest(self, session: Session, number: int, payload: bytes, subscriber: str, wait_s: float) -> Answer:
        return msgspec.to_builtins(await self._core.next_manifest(subscriber, wait_s)), b""

    async def _recall(self, session: Session, number: int, payload: bytes, wait_s: float) -> Answer:
        await self._core.recall(wait_s)
        return _NOTHING

    async def _gave_up(self, session: Session, number: int, payload: bytes, subscriber: str) -> Answer:
        await self._core.gave_up(subscriber)
        return _NOTHING

    async def _hold_engines(self, session: Session, number: int, payload: bytes, holder: str, wait_s: float) -> Answer:
        await self._core.hold_engines(holder, wait_s)
        session.holds.take(holder)
        session.can_undo(number, lambda: session.let_go(holder))
        return _NOTHING

    async def _let_go(self, session: Session, number: int, payload: bytes, holder: str) -> Answer:
        await self._core.let_go(holder)
        session.holds.discard(holder)
        return _NOTHING

    async def _acknowledge(self, session: Session, number: int, payload: bytes, subscriber: str, version: int) -> Answer:
        await self._core.acknowledge(subscriber, version)
        return _NOTHING

    async def _reject(
        self, session: Session, number: int, payload: bytes, subscriber: str, version: int, reason: str
    ) -> Answer:
        await self._core.reject(subscriber, version, reason)
        return _NOTHING

    async def _wait_acknowledged(self, session: Session, number: int, payload: bytes, version: int, wait_s: float) -> Answer:
        await self._core.wait_acknowledged(version, wait_s)
        return _NOTHING

    # -- observation and life -----------------------------------------------------------------------------------------
    async def _emit(self, session: Session, number: int, payload: bytes, event: dict[str, Any]) -> Answer:
        await self._core.emit(event)
        return _NOTHING

    async def _events(self, session: Session, number: int, payload: bytes, after: int, wait_s: float) -> Answer:
        return await self._core.events(after, wait_s), b""

    async def _stats(self, session: Session, number: int, payload: bytes) -> Answer:
        return await self._core.stats(), b""

    async def _snapshot(self, session: Session, number: int, payload: bytes, path: str) -> Answer:
        await self._core.snapshot(path)
        return _NOTHING

    # -- columns ------------------------------------------------------------------------------------------------------
    def _fetch(self, session: Session, payload: bytes, key: int | None) -> Fetch:
        """Reads the message's own bytes, or the block that its client wrote; read-only, so that the core keeps the arrays."""
        block = None if key is None else session.blocks.pop(key, None)
        if key is not None and block is None:
            raise BusError(f"block {key} of shared memory is not this client's")
        source: bytes | Bytes = payload
        if block is not None:
            source = block.view(np.ndarray)
            source.flags.writeable = False
        return lambda where: part(source, where)

    def _pack(self, name: str, groups: list[Group], outbox: Outbox) -> list[Any]:
        """The column's parts: what lies in the arena by location, the rest joined and beside the header."""
        columns = [group.columns[name] for group in groups]
        if not columns:
            shape = self._core.rows.schema.shapes.get(name)
            columns = [shape.empty() if shape is not None else []]
        if not any(self._is_shared(column) for column in columns):
            columns = [join(columns)] if len(columns) > 1 else columns
        return [pack(column, outbox.place) for column in columns]

    def _is_shared(self, column: Column) -> bool:
        array = column.values if isinstance(column, Ragged) else column
        return isinstance(array, np.ndarray) and self._arena.locate(array) is not None


def _unpack(columns: dict[str, Any], fetch: Fetch) -> dict[str, Column]:
    return {name: unpack(packed, fetch) for name, packed in columns.items()}


def _pack_shared(group: Group, outbox: Outbox) -> dict[str, Any]:
    return {name: pack_array(array, outbox.place) for name, array in group.shared.items()}
