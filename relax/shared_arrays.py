"""Arrays that one process writes and others read where they lie, without a copy: what media become.

    place(arrays) -> memory's descriptor --over a socket--> take(...) -> arrays --lend--> loan, in any message --borrow--> array

The memory has no name in a file system. A loan says where in /proc its owner's descriptor is, which is good while an array of
the owner lives; whoever has borrowed keeps the memory, whatever becomes of the owner. The last process to let go frees it.
"""

import mmap
import os
import resource
import tempfile
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
LEAST_LOAN = 16 << 10  # bytes; less is sooner copied than mapped
_MOST_FILES = 1 << 16


class Placed(msgspec.Struct):
    """An array in shared memory: `offset` in bytes."""

    dtype: str
    shape: list[int]
    offset: int


class Loan(NamedTuple):
    """Where another process finds an array: the owner's process and descriptor, and the number of the file behind it."""

    pid: int
    fd: int
    inode: int
    offset: int
    dtype: str
    shape: list[int]


class Memory(mmap.mmap):
    """Shared memory as this process sees it, read-only, with a descriptor of its own that others may open."""

    fd: int

    @staticmethod
    def at(fd: int) -> "Memory":
        """All of what `fd` stands for, which stays the caller's."""
        _allow_files()
        memory = Memory(fd, 0, access=mmap.ACCESS_READ)
        memory.fd = os.dup(fd)
        weakref.finalize(memory, os.close, memory.fd).atexit = False
        return memory


def place(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Placed], int, int]:
    """Copies the arrays into new shared memory: their places, its size, its file descriptor. Raises `OSError` without room."""
    placed, end = {}, 0
    for name, values in arrays.items():
        placed[name] = Placed(values.dtype.str, list(values.shape), end)
        end += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
    fd = _new_memory()
    try:
        _make_room(fd, end)
        if end:
            with mmap.mmap(fd, end) as memory:
                for name, values in arrays.items():
                    target = np.ndarray(values.shape, values.dtype, memory, placed[name].offset)
                    np.copyto(target, values)
                    del target  # or the memory cannot be closed
    except OSError:
        os.close(fd)
        raise
    return placed, end, fd


def take(placed: Mapping[str, Placed], num_bytes: int, fd: int) -> dict[str, NDArray[Any]]:
    """The arrays in the shared memory, read-only and without a copy; the memory is freed with the last of them."""
    memory = Memory.at(fd) if num_bytes else b""
    return {name: np.ndarray(at.shape, np.dtype(at.dtype), memory, at.offset) for name, at in placed.items()}


def share(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Copies of the arrays that can be lent. Raises `OSError` without room."""
    placed, num_bytes, fd = place(arrays)
    try:
        return take(placed, num_bytes, fd)
    finally:
        os.close(fd)


def lend(array: NDArray[Any]) -> Loan | None:
    """Where others find the array; None for one that does not lie in shared memory, or is not worth the trouble."""
    base: Any = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, Memory) or array.nbytes < LEAST_LOAN or not array.flags.c_contiguous:
        return None
    start = np.frombuffer(base, np.uint8).__array_interface__["data"][0]
    offset = array.__array_interface__["data"][0] - start
    return Loan(os.getpid(), base.fd, os.fstat(base.fd).st_ino, offset, array.dtype.str, list(array.shape))


def borrow(loan: Loan) -> NDArray[Any]:
    """The array where it lies, read-only. Raises `OSError` when its owner has let it go, `ValueError` for no such array."""
    fd = os.open(f"/proc/{int(loan.pid)}/fd/{int(loan.fd)}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_ino != loan.inode:
            raise FileNotFoundError(f"process {loan.pid} has freed the shared memory of an array")
        if loan.offset < 0 or min(loan.shape, default=0) < 0:  # which numpy does not look at, or takes for a question
            raise ValueError(f"no array lies in shared memory at {loan}")
        return np.ndarray(loan.shape, np.dtype(loan.dtype), Memory.at(fd), loan.offset)
    except TypeError as error:  # numpy's own word for what lies outside of the memory
        raise ValueError(f"no array lies in shared memory at {loan}: {error}") from error
    finally:
        os.close(fd)


def _new_memory() -> int:
    """The file descriptor of memory that no name leads to, empty as yet."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("relax-arrays")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _make_room(fd: int, size: int) -> None:
    os.truncate(fd, size)
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)  # takes the pages now: without it a lack of memory would kill whoever writes to them


@cache
def _allow_files() -> None:
    """Each memory takes two descriptors, and a queue may hold thousands of them: the usual limit of 1,024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
