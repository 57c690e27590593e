"""What a media pool and its workers say to each other: msgpack behind a length of four bytes, little-endian.

Arrays do not go through the pipe: a worker writes them into memory that it shares (`relax/shared_arrays.py`), and sends that
memory's file descriptor with the message that says where in it they are.
"""

import os
import socket
from typing import Any, TypeVar

import msgspec

from relax.shared_arrays import Placed
from relax.types import Media

T = TypeVar("T")


class Setup(msgspec.Struct):
    """First message to a worker: how media are decoded, what is made of them, and where modules are looked for."""

    config: dict[str, Any]
    processor: str | None
    options: dict[str, Any]
    sys_path: list[str]


class Refused(msgspec.Struct, tag=True):
    """The worker cannot be set up, or a prompt's media cannot be decoded: a `ConfigError`'s or `DataError`'s words."""

    error: str


class Ready(msgspec.Struct, tag=True):
    """The worker waits for prompts."""


class Job(msgspec.Struct):
    """One prompt: its key, messages (where there is a processor to read them) and media."""

    key: str
    messages: list[dict[str, Any]]
    media: list[Media]


class Done(msgspec.Struct, tag=True):
    """One prompt's result: `values` by name, arrays at their places; `num_bytes` of shared memory came with it."""

    values: dict[str, Any]
    arrays: dict[str, Placed]
    num_bytes: int


def send(channel: socket.socket, message: msgspec.Struct, fd: int | None = None) -> int:
    """Sends one message, and a file descriptor with it; returns the bytes that went through the pipe."""
    body = msgspec.msgpack.encode(message)
    packet = len(body).to_bytes(4, "little") + body
    sent = socket.send_fds(channel, [packet], [fd]) if fd is not None else 0
    channel.sendall(packet[sent:])
    return len(packet)


def receive(channel: socket.socket, kind: type[T]) -> tuple[T, int | None] | None:
    """The next message and the file descriptor that came with it; None at the end of the channel.

    Raises `msgspec.MsgspecError` when it is no such message, `TimeoutError` as the channel's time limit says.
    """
    head, fd = _read(channel, 4)
    if head is None:
        return None
    body, _ = _read(channel, int.from_bytes(head, "little"))
    if body is None:
        _close(fd)
        return None
    try:
        return msgspec.msgpack.decode(body, type=kind), fd
    except msgspec.MsgspecError:
        _close(fd)
        raise


def _read(channel: socket.socket, size: int) -> tuple[bytes | None, int | None]:
    chunks, fd = bytearray(), None
    while len(chunks) < size:
        chunk, fds, _, _ = socket.recv_fds(channel, min(size - len(chunks), 1 << 20), 1)
        if fds:
            _close(fd)
            fd = fds[0]
        if not chunk:
            _close(fd)
            return None, None
        chunks += chunk
    return bytes(chunks), fd


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
