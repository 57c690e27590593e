"""Child processes that can be killed with all that they started, and never outlive their parent.

Not `multiprocessing`: a fork would inherit torch and ray, and a spawn runs the main script again, which need not have a
guard.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import relax


def start_child(module: str, fds: Sequence[int], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Runs `python -m module FDS` in a process group of its own; it inherits the file descriptors."""
    root = str(Path(relax.__file__).parent.parent)
    paths = os.pathsep.join(path for path in [root, os.environ.get("PYTHONPATH", "")] if path)
    return subprocess.Popen(
        # -P: a file math.py or random.py in the working directory must not hide Python's own
        [sys.executable, "-P", "-m", module, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # what the child starts is killed with it, and Ctrl-C is the parent's
        env={
            **os.environ,
            **(environment or {}),
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        },
    )


def end_child(process: subprocess.Popen[bytes]) -> str:
    """Kills the child's process group, unless the child has already ended by itself; reaps it and says how it ended."""
    try:
        process.wait(0.05)  # a child that closed its end is about to exit: how is worth knowing
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    code = process.wait()
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def die_with_parent(life_fd: int) -> None:
    """Called in the child. The parent holds the other end of this pipe. On Linux the kernel kills the process group when it
    closes, even inside a C function that never returns; elsewhere a thread does, as soon as it gets to run."""
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        os.read(life_fd, 1)  # nothing is ever written: this returns at its end
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
