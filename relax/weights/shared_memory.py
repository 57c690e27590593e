"""The one-host transport: files in /dev/shm, in a folder of their own for each publisher.

    publisher   file.resize -> file.lock_for_writing -> write -> unlock -> announce
    receiver    open -> shared lock -> map privately ... the lock goes when the last tensor over the mapping does

The locks are the kernel's (flock), so a process that dies holds none: a folder whose owner is gone can be told and removed,
and a buffer that somebody still reads is never written over.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from relax.errors import WeightSyncError

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "relax-weights"
_OWNER_FILE = "owner"
_BEING_MADE_S = 60.0


def default_roots() -> tuple[tuple[str, Path], ...]:
    """(transport, folder) in the order in which they are tried: shared memory, then the temporary directory."""
    roots = [("shm", SHARED_MEMORY)] if os.access(SHARED_MEMORY, os.W_OK) else []
    return (*roots, ("file", Path(tempfile.gettempdir())))


class NoRoom(WeightSyncError):
    """No file system has room for the weights now. It may have later, when a receiver has let a buffer go."""


class BufferFile:
    """One file that holds one version at a time. `data` is the writer's mapping, `path` what receivers open."""

    def __init__(self, path: Path, transport: str) -> None:
        self.path, self.transport = path, transport
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.data: mmap.mmap | None = None

    def resize(self, num_bytes: int) -> None:
        """Makes the file exactly so large, while nobody reads it.

        All of its pages are set aside now: a full file system is an `OSError` here, not a fatal signal while writing.
        """
        if self.data is None or len(self.data) != num_bytes:
            self.data = None
            os.ftruncate(self._fd, num_bytes)
            os.posix_fallocate(self._fd, 0, num_bytes)
            self.data = mmap.mmap(self._fd, num_bytes)

    def lock_for_writing(self) -> bool:
        """False while a receiver holds tensors over this file."""
        return _try_lock(self._fd, fcntl.LOCK_EX)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Removes the file; receivers keep what they have mapped."""
        self.data = None
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


class ShmFolder:
    """A publisher's own folder (mode 0700) of buffer files, made with the first file.

    `close` leaves nothing behind. What a killed owner left goes when the next folder is made, or at a `cleanup_stale`.
    """

    def __init__(self, run_id: str, *, roots: Sequence[tuple[str, Path]] | None = None) -> None:
        self._roots = tuple(roots) if roots is not None else default_roots()
        self._name = f"{PREFIX}-{os.getpid()}-{re.sub(r'[^A-Za-z0-9._-]', '_', run_id)[:64]}-{secrets.token_hex(4)}"
        self._folders: dict[Path, int] = {}  # folder -> file descriptor that holds its owner's lock
        self._num_files = 0
        cleanup_stale([root for _, root in self._roots])

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folders that exist: none before the first file, two once shared memory was too small."""
        return tuple(self._folders)

    def new_file(self, num_bytes: int) -> BufferFile:
        """A file of `num_bytes` on the first root that has room. Raises `NoRoom` with each one's reason."""
        reasons = []
        for transport, root in self._roots:
            file: BufferFile | None = None
            try:
                file = BufferFile(self._folder(root) / f"buffer-{self._num_files}", transport)
                file.resize(num_bytes)
            except OSError as error:
                if file is not None:
                    file.close()
                reasons.append(f"{root}: {error.strerror or error}")
                continue
            self._num_files += 1
            return file
        raise NoRoom(
            f"no room for {num_bytes / 2**20:.1f} MiB of weights to publish ({'; '.join(reasons)}): enlarge /dev/shm (of a "
            "container: --shm-size), or set TMPDIR to a folder with room"
        )

    def close(self) -> None:
        for folder, lock in self._folders.items():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
        self._folders = {}

    def _folder(self, root: Path) -> Path:
        folder = root / self._name
        if folder not in self._folders:
            folder.mkdir(mode=0o700)
            lock = os.open(folder / _OWNER_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            _try_lock(lock, fcntl.LOCK_EX)
            self._folders[folder] = lock
        return folder


def cleanup_stale(roots: Sequence[Path] | None = None) -> list[Path]:
    """Removes the folders of this user whose owners no longer live; returns what was removed."""
    removed = []
    for root in roots if roots is not None else [root for _, root in default_roots()]:
        for folder in root.glob(f"{PREFIX}-*"):
            with contextlib.suppress(OSError):  # another user's, or somebody else removes it at this moment
                if _is_stale(folder):
                    shutil.rmtree(folder)
                    removed.append(folder)
    return removed


class PublishedFile:
    """A published file as its reader has it: locked against the writer while it is open, and while anything mapped is in use.

    Raises `WeightSyncError` when the file is gone, is being written again, or does not have `num_bytes`.
    """

    def __init__(self, location: str, num_bytes: int) -> None:
        try:
            self._fd = os.open(location, os.O_RDONLY)
        except OSError as error:
            raise WeightSyncError(
                f"weights at {location} cannot be opened ({error.strerror}): the publisher ended, or runs on another host"
            ) from error
        size = os.fstat(self._fd).st_size
        reason = ""
        if not _try_lock(self._fd, fcntl.LOCK_SH):
            reason = "are being replaced by a newer version"
        elif size != num_bytes:
            reason = f"have {size} bytes, the manifest says {num_bytes}"
        if reason:
            os.close(self._fd)
            raise WeightSyncError(f"weights at {location} {reason}")

    def map(self, start: int, end: int) -> tuple[mmap.mmap, int]:
        """Bytes `start` to `end`, and the byte at which the mapping begins: at most a page earlier.

        The mapping is the reader's own: what it writes stays with it, and no writer changes it while it is referenced.
        """
        first = start - start % mmap.ALLOCATIONGRANULARITY
        # The mapping keeps a duplicate of the locked descriptor.
        return mmap.mmap(self._fd, end - first, access=mmap.ACCESS_COPY, offset=first), first

    def __enter__(self) -> "PublishedFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _is_stale(folder: Path) -> bool:
    try:
        fd = os.open(folder / _OWNER_FILE, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _BEING_MADE_S
    try:
        return _try_lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
