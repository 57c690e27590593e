"""Where a queue listens: a Unix socket in a directory that only its owner may enter."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from relax.bus.processes import parse_process, this_process
from relax.errors import BusError

_PREFIX = "relax-bus-"
_MAX_PATH = 100  # bytes; a Unix socket's path ends at 107


def new_address() -> str:
    """`ipc://` and a socket's path in a new private directory; directories of dead processes are removed."""
    parents = [path for path in (Path(tempfile.gettempdir()), Path("/tmp")) if path.is_dir()]
    for parent in parents:
        _remove_leftovers(parent)
        if len(os.fsencode(parent / f"{_PREFIX}{this_process()}-12345678" / "queue")) <= _MAX_PATH:
            folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{this_process()}-", dir=parent)  # made with mode 0700
            return f"ipc://{folder}/queue"
    raise BusError(f"{parents[0]}: too long a path for a Unix socket; set TMPDIR to a shorter one")


def socket_path(address: str) -> Path:
    """The path of an `ipc://` address; raises `BusError` for others, which anybody could connect to."""
    path = Path(address.removeprefix("ipc://"))
    if not address.startswith("ipc:///"):
        raise BusError(f"{address}: the transfer queue listens on ipc:///absolute/path only")
    if len(os.fsencode(path)) > _MAX_PATH:
        raise BusError(f"{address}: a Unix socket's path has at most {_MAX_PATH} bytes, this one {len(os.fsencode(path))}")
    return path


class AddressLock:
    """Holds an address for one server: a second one gets an error instead of taking the first one's clients."""

    def __init__(self, address: str) -> None:
        self.path = socket_path(address)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BusError(f"{address}: cannot be used: {error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise BusError(f"{address}: in use by another transfer queue; two runs need two addresses") from error

    def release(self) -> None:
        """Removes the socket, the lock and, if `new_address` made it, the directory."""
        for path in (self.path, Path(f"{self.path}.lock")):
            path.unlink(missing_ok=True)
        os.close(self._descriptor)
        if self.path.parent.name.startswith(_PREFIX):
            with contextlib.suppress(OSError):  # somebody else keeps a file in it
                self.path.parent.rmdir()


def _remove_leftovers(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        owner = parse_process("-".join(path.name.removeprefix(_PREFIX).split("-")[:2]))
        if owner is not None and not owner.is_alive and path.owner() == Path("/proc/self").owner():
            shutil.rmtree(path, ignore_errors=True)
