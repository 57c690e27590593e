"""Shared memory for column data: a few large files in /dev/shm, owned by the core, whose pages are used again and again.

Pages that were used before are written about ten times faster than fresh ones. A producer that dies takes nothing with
it, since the core owns the memory; a block is free again when the last array on it is gone. Files of a crashed owner are
removed by the next one that starts.
"""

import contextlib
import mmap
import os
import secrets
import tempfile
import weakref
from bisect import bisect_left, insort
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax.bus.packing import Bytes
from relax.bus.processes import parse_process, this_process
from relax.errors import BusError

_PREFIX = "relax-arena-"
_ALIGN = 64  # bytes; a cache line
_FIRST_SEGMENT, _LARGEST_SEGMENT = 16 << 20, 64 << 20  # bytes


class Location(NamedTuple):
    """Bytes in the arena: which file, from where, how many."""

    segment: int
    offset: int
    size: int


class Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of one allocation, uint8 [size]; arrays on it keep it alive through their `base`."""

    location: Location


class Arena:
    """The owner's side: allocates, finds and frees. `directories` are tried in turn when one has no room."""

    def __init__(self, directories: tuple[str, ...] = ("/dev/shm", tempfile.gettempdir())) -> None:
        self._directories = [Path(path) for path in directories if Path(path).is_dir()]
        self.name = f"{_PREFIX}{this_process()}-{secrets.token_hex(4)}"
        self.paths: list[str] = []  # by segment
        self._maps: list[mmap.mmap] = []
        self._free: list[list[tuple[int, int]]] = []  # by segment: (offset, size), sorted, never touching
        self._returned: deque[Location] = deque()  # freed by whichever thread dropped the last array
        for directory in self._directories:
            remove_leftovers(directory)

    @property
    def num_free_bytes(self) -> int:
        self._take_back()
        return sum(size for free in self._free for _, size in free)

    @property
    def num_bytes(self) -> int:
        return sum(len(mapped) for mapped in self._maps)

    def allocate(self, size: int) -> Block:
        """A block of `size` bytes; raises `BusError` when no directory has room for another file."""
        self._take_back()
        wanted = max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        for segment, free in enumerate(self._free):
            for index, (offset, length) in enumerate(free):
                if length >= wanted:
                    free[index : index + 1] = [(offset + wanted, length - wanted)] if length > wanted else []
                    return self._block(segment, offset, size, wanted)
        self._grow(wanted)
        return self.allocate(size)

    def locate(self, array: NDArray[Any]) -> Location | None:
        """Where a contiguous array lies in the arena; `None` for one that does not."""
        base = array.base
        while isinstance(base, np.ndarray) and not isinstance(base, Block):
            base = base.base
        if not isinstance(base, Block):
            return None
        inside = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        return Location(base.location.segment, base.location.offset + inside, array.nbytes)

    def close(self) -> None:
        """Removes the files. Arrays that are still on them stay readable in this process."""
        for path in self.paths:
            Path(path).unlink(missing_ok=True)
        self._free.clear()

    def _block(self, segment: int, offset: int, size: int, taken: int) -> Block:
        block = np.ndarray.__new__(Block, (size,), np.uint8, self._maps[segment], offset)
        block.location = Location(segment, offset, size)
        weakref.finalize(block, self._returned.append, Location(segment, offset, taken)).atexit = False
        return block

    def _take_back(self) -> None:
        while self._returned:
            segment, offset, size = self._returned.popleft()
            if segment >= len(self._free):
                return  # closed
            free = self._free[segment]
            at = bisect_left(free, (offset, 0))
            if at < len(free) and free[at][0] == offset + size:
                size += free.pop(at)[1]
            if at > 0 and sum(free[at - 1]) == offset:
                offset, before = free.pop(at - 1)
                size += before
            insort(free, (offset, size))

    def _grow(self, wanted: int) -> None:
        size = max(-(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE, min(_LARGEST_SEGMENT, _FIRST_SEGMENT << len(self.paths)))
        errors = []
        for directory in self._directories:
            path = directory / f"{self.name}-{len(self.paths)}"
            try:
                self._maps.append(_make_file(path, size))
            except OSError as error:
                errors.append(f"{directory}: {error.strerror}")
                continue
            self.paths.append(str(path))
            self._free.append([(0, size)])
            return
        raise BusError(
            f"no room for {size >> 20} MiB more of column data ({self.num_bytes >> 20} MiB are in use): {'; '.join(errors)}; "
            "make /dev/shm larger, or rollout.prompts_per_step smaller"
        )


class ArenaView:
    """A client's side: maps the owner's files when it first needs one."""

    def __init__(self) -> None:
        self._maps: dict[str, Bytes] = {}

    def view(self, path: str, offset: int, size: int) -> Bytes:
        """The bytes there, uint8 [size], writable."""
        if path not in self._maps:
            try:
                descriptor = os.open(path, os.O_RDWR)
            except OSError as error:
                raise BusError(f"{path}: the queue's shared memory cannot be opened: {error}") from error
            try:
                mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
            finally:
                os.close(descriptor)
            self._maps[path] = np.frombuffer(mapped, np.uint8)
        return self._maps[path][offset : offset + size]

    def close(self) -> None:
        """Lets go of the files; they are unmapped with the last array on them."""
        self._maps.clear()


def remove_leftovers(directory: Path) -> None:
    """Removes the arena files whose owner is dead; those of other users are left alone."""
    for path in directory.glob(f"{_PREFIX}*"):
        owner = parse_process("-".join(path.name.removeprefix(_PREFIX).split("-")[:2]))
        if owner is not None and not owner.is_alive:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                path.unlink()


def _make_file(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # takes the pages now: without it a full /dev/shm would kill whoever writes to them, with SIGBUS
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
