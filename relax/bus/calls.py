"""Calls over a socket to the queue's core: numbered, answered once, repeated when they got lost.

    call 7 ------------> done, its answer is remembered      ping 9 (oldest 7) --> under way: []
         X-- answer                                                 <-----------
    call 7 again ------> not done again; the answer once more

Messages of one client keep their order. So a ping's answer that does not name a call sent before the ping as under way says
that its request or its answer is lost; the call is then sent again under its number, and the server does it once.
"""

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from relax.bus.address import socket_path
from relax.bus.processes import ProcessId, this_process
from relax.bus.wire import NOTICE, Channel, decode, decode_error, encode
from relax.errors import BusError, BusGone

BEAT_S = 1.0
SILENCE_BEATS = 8
ANSWER_S = 60.0
"""Longest time for an answer, beyond what the call itself may wait: a living core answers in milliseconds."""
_MAX_WAIT_S = 1e7
_BYE_S = 2.0

Answer = tuple[Any, bytes]


@dataclass(slots=True, eq=False)
class _Call:
    """A call without an answer. `sent`: its place in the order of everything that was sent; `needs`: the oldest call whose
    answer the server must still remember for it."""

    frames: list[bytes]
    future: asyncio.Future[Answer]
    sent: int
    needs: int


class Calls:
    """The connection of one client. `drop`: asked for each message that goes out or comes in; true loses it, for rehearsals."""

    def __init__(self, address: str, name: str, drop: Callable[[], bool] | None = None) -> None:
        self.address, self.name, self._drop = address, name, drop
        self.gone: BusGone | None = None
        self.lease_s = 0.0
        self._numbers = itertools.count(NOTICE + 1)
        self._pending: dict[int, _Call] = {}
        self._incarnation = -1
        self._silent_beats = 0
        self._pings: set[int] = set()  # without an answer
        self.num_resent = 0

    async def open(self, wait_s: float) -> None:
        """Connects; raises `BusGone` when nobody answers in `wait_s`."""
        socket_path(self.address)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"\x01" + secrets.token_bytes(16))
        socket.connect(self.address)
        self._channel = Channel(socket, self._receive)
        try:
            async with asyncio.timeout(wait_s):
                answer, _ = await self._repeat("hello", {"name": self.name, "process": this_process()})
        except TimeoutError as error:
            self._channel.close()
            raise BusGone(f"no transfer queue answers at {self.address} within {wait_s:g} s") from error
        self._incarnation, self.lease_s = answer["incarnation"], answer["lease_s"]
        self._server = ProcessId(*answer["process"])
        self._heart = asyncio.create_task(self._beat(), name="relax-bus-heart")

    async def close(self) -> None:
        """Says goodbye. May be called again."""
        if self.gone is None:
            try:
                async with asyncio.timeout(_BYE_S):
                    await self._repeat("bye", {})
            except (TimeoutError, BusError):
                pass  # the core is gone, or will find out that this client is
            self._lose("this client of the transfer queue is closed")
        self._heart.cancel()
        await asyncio.gather(self._heart, return_exceptions=True)
        self._channel.close()

    # -- calls --------------------------------------------------------------------------------------------------------
    async def call(
        self, operation: str, arguments: dict[str, Any], payload: bytes = b"", *, wait_s: float | None = None
    ) -> Answer:
        """What the server answers: values, and bytes beside them. `wait_s`: how long the call may wait there."""
        if self.gone is not None:
            raise BusGone(str(self.gone))
        if wait_s is not None:
            arguments["wait_s"] = wait_s = max(0.0, min(wait_s, _MAX_WAIT_S)) if not math.isnan(wait_s) else 0.0
        try:
            number = next(self._numbers)
            header = encode(number, self._incarnation, operation, arguments)
        except (TypeError, OverflowError) as error:
            raise BusError(f"{operation}: {error}; only JSON values travel") from error
        loop = asyncio.get_running_loop()
        future = self._begin(number, [header, payload] if payload else [header], needs=number)
        limit = ANSWER_S + (wait_s or 0.0)
        timer = loop.call_later(limit, self._give_up, number, operation, limit)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            timer.cancel()
            self._pending.pop(number, None)

    def _begin(self, number: int, frames: list[bytes], needs: int) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Call(frames, future, number, needs)
        self._send(frames)
        return future

    async def _repeat(self, operation: str, arguments: dict[str, Any]) -> Answer:
        """A call without the help of pings, which does nothing when it comes twice: sent until it is answered."""
        number = next(self._numbers)
        frames = [encode(number, self._incarnation, operation, arguments)]
        future = self._begin(number, frames, needs=number)
        try:
            while True:
                done, _ = await asyncio.wait([future], timeout=BEAT_S / 4)
                if done:
                    return future.result()
                self._send(frames)
        finally:
            self._pending.pop(number, None)

    def _give_up(self, number: int, operation: str, limit: float) -> None:
        call = self._pending.get(number)
        if call is not None and not call.future.done():
            call.future.set_exception(
                BusGone(f"{operation}: the transfer queue at {self.address} gave no answer in {limit:g} s")
            )
        self._cancel(number)

    def _cancel(self, number: int) -> None:
        """What the call's answer hands out goes back. Repeated until it is answered, though nobody waits for it."""
        if self.gone is None and self._incarnation >= 0:
            own = next(self._numbers)
            future = self._begin(own, [encode(own, self._incarnation, "cancel", {"number": number})], needs=number)
            future.add_done_callback(lambda done: (done.cancelled() or done.exception(), self._pending.pop(own, None)))

    # -- messages -----------------------------------------------------------------------------------------------------
    def _send(self, frames: list[bytes]) -> None:
        if self._drop is None or not self._drop():
            self._channel.send(frames)

    def _receive(self, frames: list[bytes]) -> None:
        if self._drop is not None and self._drop():
            return
        self._silent_beats = 0
        number, ok, result = decode(frames[0])
        if number == NOTICE:
            self._lose(str(decode_error(result)))
            return
        if number in self._pings:
            if ok:
                self._resend(number, set(result))
            else:
                self._lose(str(decode_error(result)))  # the server does not know this client, so that no call will be answered
            return
        call = self._pending.get(number)
        if call is None or call.future.done():
            return
        if ok:
            call.future.set_result((result, frames[1] if len(frames) > 1 else b""))
        else:
            call.future.set_exception(decode_error(result))

    async def _beat(self) -> None:
        """Counts beats without an answer, not seconds: a loop that was held up by its own work must not see a dead core."""
        while self.gone is None:
            self._ping()
            await asyncio.sleep(BEAT_S)
            self._silent_beats += 1
            if not self._server.is_alive:
                self._lose(f"the transfer queue's process {self._server.pid} died")
            elif self._silent_beats > SILENCE_BEATS:
                self._lose(f"the transfer queue at {self.address} has said nothing for {SILENCE_BEATS * BEAT_S:g} s")

    def _ping(self) -> None:
        number = next(self._numbers)
        oldest = min((call.needs for call in self._pending.values()), default=number)
        self._pings.add(number)
        self._send([encode(number, self._incarnation, "ping", {"oldest": oldest})])

    def _resend(self, ping: int, under_way: set[int]) -> None:
        """Sends again what was sent before the ping and is neither answered nor under way."""
        self._pings = {number for number in self._pings if number > ping}
        for number, call in self._pending.items():
            if call.sent < ping and number not in under_way and not call.future.done():
                call.sent = next(self._numbers)
                self.num_resent += 1
                self._send(call.frames)

    def _lose(self, why: str) -> None:
        if self.gone is None:
            self.gone = BusGone(why)
            for call in list(self._pending.values()):
                if not call.future.done():
                    call.future.set_exception(BusGone(why))
