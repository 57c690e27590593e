"""What a media pool and its workers say to each other: msgpack behind a length of four bytes, little-endian.

Arrays do not go through the pipe: a worker writes them into memory that it shares, and sends that memory's file descriptor
with the message that says where in it they are.
"""

import mmap
import os
import socket
import tempfile
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax.types import Media

ALIGNMENT = 64
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


class Placed(msgspec.Struct):
    """An array in the shared memory: `offset` in bytes."""

    dtype: str
    shape: list[int]
    offset: int


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


def place(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Placed], int, int]:
    """Copies the arrays into new shared memory: their places, its size, its file descriptor. Raises `OSError` without room."""
    placed, end = {}, 0
    for name, values in arrays.items():
        placed[name] = Placed(values.dtype.str, list(values.shape), end)
        end += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
    fd = _memory(end)
    if end:
        with mmap.mmap(fd, end) as memory:
            for name, values in arrays.items():
                target = np.ndarray(values.shape, values.dtype, memory, placed[name].offset)
                np.copyto(target, values)
                del target  # or the memory cannot be closed
    return placed, end, fd


def take(placed: Mapping[str, Placed], num_bytes: int, fd: int) -> dict[str, NDArray[Any]]:
    """The arrays in the shared memory, read-only and without a copy; the memory is freed with the last of them."""
    memory = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ) if num_bytes else b""
    return {name: np.ndarray(at.shape, np.dtype(at.dtype), memory, at.offset) for name, at in placed.items()}


def _memory(size: int) -> int:
    """The file descriptor of so many bytes that no name leads to."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("relax-media")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)  # takes the pages now: without it a lack of memory would kill whoever writes to them
    return fd


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
