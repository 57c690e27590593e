"""Messages between clients and the server: msgpack headers, raw bytes beside them, over one ZeroMQ socket each.

request:  [number, session, operation, arguments]  + bytes        reply: [number, ok, result or [error, arguments]]  + bytes
array:    [-1, offset, size] in the bytes beside the header, or [segment, offset, size] in the shared arena
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from relax import errors
from relax.bus.arena import Location
from relax.bus.columns import encode_json
from relax.bus.packing import Bytes
from relax.errors import BusError, RelaxError, WaitTimeout

INLINE = -1
INLINE_LIMIT = 16 << 10  # bytes; larger payloads go through the arena
SPARE_LIMIT = 16 << 20  # bytes; beyond it a call more costs nothing beside the copy
NOTICE = 0  # the number of a message that answers no request
_ALIGN = 64  # bytes; a cache line
# plain numbers: arithmetic on the library's enumerations costs as much as a call
_NOW, _MORE_FOLLOWS, _HAS_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.RCVMORE)
_EVENTS, _CAN_READ = int(zmq.EVENTS), int(zmq.POLLIN)
_BURST = 64  # messages handled before the loop's other work gets its turn

_decoder = msgspec.msgpack.Decoder()


class Outbox:
    """Collects the bytes that ride beside a header."""

    def __init__(self, locate: Callable[[NDArray[Any]], Location | None] = lambda array: None) -> None:
        self._locate, self._parts, self._end = locate, list[Any](), 0

    def place(self, array: NDArray[Any]) -> tuple[int, int, int]:
        location = self._locate(array)
        if location is not None:
            return location
        self._parts.append(array.reshape(-1).view(np.uint8).data)
        self._end += array.nbytes
        return INLINE, self._end - array.nbytes, array.nbytes

    def join(self) -> bytes:
        return b"".join(self._parts)


class Payload:
    """The arrays of a request in one run of bytes: beside the header, or in a block of the arena at the same offsets."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, NDArray[Any]]] = []
        self.size = 0

    def place(self, array: NDArray[Any]) -> tuple[int, int, int]:
        self._arrays.append((self.size, array))
        where = (INLINE, self.size, array.nbytes)
        self.size += -(-array.nbytes // _ALIGN) * _ALIGN
        return where

    def write(self, target: Bytes) -> None:
        """Copies the arrays into `target`, uint8 [size]."""
        for start, array in self._arrays:
            target[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)

    def join(self) -> bytes:
        target = np.zeros(self.size, np.uint8)
        self.write(target)
        return target.tobytes()


def part(source: bytes | Bytes, where: Sequence[int]) -> Bytes:
    """The bytes at a place of a message; raises `BusError` for one outside of it."""
    _, offset, size = where
    if not 0 <= offset <= offset + size <= len(source):
        raise BusError(f"a message names bytes {offset} to {offset + size} of {len(source)}")
    return source[offset : offset + size] if isinstance(source, np.ndarray) else np.frombuffer(source, np.uint8, size, offset)


class Channel:
    """A ZeroMQ socket on the running loop. Messages are drained in bursts, which costs a fraction of a task each."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket, self._on_message = socket, on_message
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = self._is_draining = self._is_closed = False
        socket.setsockopt(zmq.LINGER, 200)  # milliseconds for what is on its way when the socket is closed
        socket.setsockopt(zmq.SNDHWM, 0)  # what is on its way is bounded by the callers, who wait for answers
        socket.setsockopt(zmq.RCVHWM, 0)
        self._loop.add_reader(socket.FD, self._drain)

    def send(self, frames: Sequence[bytes]) -> None:
        if self._is_closed:
            return
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE_FOLLOWS)
        self._socket.send(frames[-1], _NOW)
        # sending may use up the signal that a message has come; a drain that goes on finds it anyway
        if not self._is_draining and int(self._socket.getsockopt(_EVENTS)) & _CAN_READ:
            self._drain_soon()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()

    def _drain_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_scheduled = False
        self._is_draining = True
        try:
            for _ in range(_BURST):
                if self._is_closed:
                    return
                try:
                    frames = [self._socket.recv(_NOW)]
                except zmq.Again:
                    return
                while self._socket.getsockopt(_HAS_MORE):
                    frames.append(self._socket.recv(_NOW))
                self._on_message(frames)
            self._drain_soon()
        except BaseException:
            self._drain_soon()  # the socket will not signal again for what has come already
            raise
        finally:
            self._is_draining = False


def encode(*parts: Any) -> bytes:
    """A header of these parts; raises `TypeError` or `OverflowError` for values that are not JSON's."""
    return encode_json(parts)


def decode(frame: bytes) -> list[Any]:
    """A header; raises `BusError` for bytes that are none."""
    try:
        message = _decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise BusError(f"a message that is not msgpack: {error}") from error
    if not isinstance(message, list) or len(message) < 3:
        raise BusError("a message that is not of the transfer queue")
    return message


def encode_error(error: RelaxError) -> list[Any]:
    """An error by class name; `decode_error` makes it again on the other side."""
    arguments = [error.what, error.reason, error.waited_s] if isinstance(error, WaitTimeout) else [str(error)]
    return [type(error).__name__, arguments]


def decode_error(encoded: list[Any]) -> RelaxError:
    """The error of `encode_error`, of the same class; a `BusError` for a class that is not known here."""
    name, arguments = encoded
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RelaxError):
        return kind(*arguments)
    return BusError(f"{name}: {arguments}")
