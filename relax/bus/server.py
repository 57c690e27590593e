"""The core behind a socket: one process serves it, any number of processes on the host connect with `client.connect`.

    server = BusServer(core, new_address())
    await server.start()       # from here on clients may connect
    ...
    await server.close()       # clients get `BusGone`

A client that dies gives everything back: its leases, its tickets, its subscriptions, its memory.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from relax.bus.address import AddressLock, new_address
from relax.bus.arena import Arena
from relax.bus.core import Core
from relax.bus.operations import Operations
from relax.bus.processes import ProcessId, this_process
from relax.bus.sessions import Owners, Session
from relax.bus.waits import caller
from relax.bus.wire import NOTICE, Channel, decode, encode, encode_error
from relax.errors import BusError, BusGone, RelaxError, StaleHandle
from relax.shared_arrays import share

log = logging.getLogger("relax.bus")

CLIENT_SILENCE_S = 60.0
"""A client that lives but says nothing for so long is taken for dead. Clients say something every second."""


class BusServer:
    """Serves `core` at `address` (`ipc://`; default: a new private one). Closing the server closes the core."""

    def __init__(self, core: Core, address: str | None = None, *, client_silence_s: float = CLIENT_SILENCE_S) -> None:
        self.core = core
        self.address = address or new_address()
        self._silence_s = client_silence_s
        self._sessions: dict[bytes, Session] = {}
        self._owners = Owners()
        self._channel: Channel | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Binds the socket; raises `BusError` when the address is in use or cannot be."""
        self._lock = AddressLock(self.address)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        try:
            socket.bind(self.address)
            self._lock.path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            socket.close()
            self._lock.release()
            raise BusError(f"{self.address}: cannot be listened on: {error}") from error
        self._arena = Arena()
        for group in self.core.rows.groups.values():  # those of a snapshot; put ones lie in shared memory already
            group.shared = share(group.shared) if group.shared else {}
        self._operations = Operations(self.core, self._arena)
        self._channel = Channel(socket, self._receive)
        self._watch = asyncio.create_task(self._watch_clients(), name="relax-bus-watch")

    async def close(self) -> None:
        """Tells the clients, closes the core and removes socket and shared memory. May be called again."""
        if self._channel is None:
            return
        channel, self._channel = self._channel, None
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        try:
            await self.core.close()
        finally:
            for identity, session in list(self._sessions.items()):
                channel.send([identity, encode(NOTICE, False, encode_error(BusGone("the transfer queue was closed")))])
                session.end()
            self._sessions.clear()
            channel.close()
            self._arena.close()
            self._lock.release()

    async def __aenter__(self) -> "BusServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- messages -----------------------------------------------------------------------------------------------------
    def _receive(self, frames: list[bytes]) -> None:
        identity, header, payload = frames[0], frames[1], frames[2] if len(frames) > 2 else b""
        try:
            number, incarnation, operation, arguments = decode(header)
            if operation == "hello":
                self._greet(identity, number, arguments["name"], ProcessId(*arguments["process"]))
                return
        except (BusError, ValueError, TypeError, KeyError) as error:
            log.warning("a message was refused: %s", error)
            return
        session = self._sessions.get(identity)
        if incarnation != self.core.incarnation:
            self._fail(identity, number, StaleHandle("the transfer queue was restarted: connect again; old handles are void"))
        elif session is None:
            self._fail(identity, number, BusGone("this client was silent for too long and was taken for dead: connect again"))
        else:
            session.heard()
            self._serve(session, number, operation, arguments, payload)

    def _greet(self, identity: bytes, number: int, name: str, process: ProcessId) -> None:
        if identity not in self._sessions:  # a greeting may come again, when its answer got lost
            self._sessions[identity] = Session(self.core, self._owners, identity, name, process)
        answer = {"incarnation": self.core.incarnation, "process": this_process(), "lease_s": self.core.limits.lease_s}
        self._reply(identity, number, answer)

    def _serve(self, session: Session, number: int, operation: str, arguments: dict[str, Any], payload: bytes) -> None:
        if operation == "ping":
            session.has_answers_before(arguments["oldest"])
            self._reply(session.identity, number, session.under_way())
        elif operation == "cancel":
            session.cancel(arguments["number"])
            self._reply(session.identity, number, None)
        elif operation == "bye":
            self._forget(session)
            self._reply(session.identity, number, None)
        elif not session.begin(number):
            self._answer_again(session, number, operation)
        elif operation in self._operations.waiting:
            work = self._answer(session, number, self._operations.waiting[operation], arguments, payload)
            session.run(number, work)
        elif operation in self._operations.instant:
            # these never suspend, so that they need no task of their own
            work = self._answer(session, number, self._operations.instant[operation], arguments, payload)
            with contextlib.suppress(StopIteration):
                work.send(None)
                raise AssertionError(f"{operation} was waiting")
        else:
            self._settle(session, number, BusError(f"the transfer queue has no operation {operation!r}"))

    def _answer_again(self, session: Session, number: int, operation: str) -> None:
        """The client has sent this call before: it is not done twice."""
        frames = session.answer(number)
        if frames is not None and self._channel is not None:
            self._channel.send(frames)
        elif number not in session.under_way():
            self._fail(session.identity, number, BusError(f"{operation} was done, but its answer was lost and is gone"))

    async def _answer(
        self,
        session: Session,
        number: int,
        handler: Callable[..., Coroutine[Any, Any, tuple[Any, bytes]]],
        arguments: dict[str, Any],
        payload: bytes,
    ) -> None:
        token = caller.set(session.name)
        try:
            result, beside = await handler(session, number, payload, **arguments)
        except RelaxError as error:
            self._settle(session, number, error)
        except Exception as error:  # the boundary: a fault in one call must reach its caller, not end the server
            log.exception("operation of client %s failed", session.name)
            self._settle(session, number, BusError(f"the transfer queue failed: {type(error).__name__}: {error}"))
        else:
            self._settle(session, number, result, beside)
        finally:
            caller.reset(token)

    def _settle(self, session: Session, number: int, result: Any, beside: bytes = b"") -> None:
        """Answers a call for good, with what it returned or raised."""
        if self._channel is not None:
            is_error = isinstance(result, RelaxError)
            header = encode(number, not is_error, encode_error(result) if is_error else result)
            frames = [session.identity, header, beside] if beside else [session.identity, header]
            session.answered(number, frames)
            self._channel.send(frames)

    def _reply(self, identity: bytes, number: int, result: Any) -> None:
        if self._channel is not None:
            self._channel.send([identity, encode(number, True, result)])

    def _fail(self, identity: bytes, number: int, error: RelaxError) -> None:
        if self._channel is not None:
            self._channel.send([identity, encode(number, False, encode_error(error))])

    # -- clients ------------------------------------------------------------------------------------------------------
    async def _watch_clients(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for session in list(self._sessions.values()):
                why = session.why_dead(self._silence_s)
                if why is not None:
                    log.warning("client %s is gone (%s): %s", session.name, why, session.belongings())
                    await self.core.emit({"kind": "client_lost", "client": session.name, "why": why, **session.belongings()})
                    self._forget(session)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.identity, None)
        session.end()
