"""The process of one program, from its fork to its end."""

import builtins
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from relax.rewards.sandbox import filters, kernel
from relax.rewards.sandbox.jobs import Job, Level

_MIB = 1 << 20
CLOSED_IN, PASSED = b"in", b"passed"  # marks that the process writes: all limits hold; the check came to its end
_LAST_UID = 65534  # of nobody, where the machine has no higher ones


@dataclass(frozen=True, slots=True)
class Cage:
    """How a program is closed in: `uid` that it gets when it comes from real root, folders that it may read and write."""

    level: Level
    uid: int | None
    readable: Sequence[str]
    packages: Sequence[str]
    folder: str


def run(job: Job, cage: Cage, fds: tuple[int, int, int, int]) -> None:
    """In the new process: closes it in, and runs the program. `fds`: standard input, output, error, and where marks are
    written. Never returns."""
    code = 1
    try:
        done_fd = _take_over(fds)
        _close_in(job, cage)
        os.write(done_fd, CLOSED_IN)
        code = _run(job, cage, done_fd)
    except BaseException:  # noqa: BLE001 - whatever it is, this process is the program's own, and ends
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 1  # the program closed what it writes to
        os._exit(code)


def _take_over(fds: tuple[int, int, int, int]) -> int:
    os.setsid()
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
    done_fd = os.dup2(fds[3], 3, inheritable=False)
    os.closerange(4, 1 << 16)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - a descriptor
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    return done_fd


def _close_in(job: Job, cage: Cage) -> None:
    limits = job.limits
    cpu_s = max(1, -int(-limits.cpu_s // 1))  # whole seconds, rounded up
    bounds = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_AS: (limits.memory_mib * _MIB,) * 2,
        resource.RLIMIT_FSIZE: (limits.disk_mib * _MIB,) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    if cage.level == "namespaces":  # elsewhere it would count the user's other processes
        bounds[resource.RLIMIT_NPROC] = (limits.max_processes,) * 2
    for which, bound in bounds.items():
        resource.setrlimit(which, bound)
    if cage.uid is not None:
        os.setgroups([])
        try:
            os.setresgid(cage.uid, cage.uid, cage.uid)
            os.setresuid(cage.uid, cage.uid, cage.uid)
        except OSError:
            os.setresgid(_LAST_UID, _LAST_UID, _LAST_UID)
            os.setresuid(_LAST_UID, _LAST_UID, _LAST_UID)
    os.chdir(cage.folder)
    os.umask(0o077)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the program may look into itself, as any other
    if cage.level == "filters":
        filters.allow_files(cage.readable, cage.folder)
    if kernel.is_known_machine():
        filters.refuse_system_calls(among_others=cage.level == "filters")
    os.environ["HOME"] = os.environ["TMPDIR"] = cage.folder


def _run(job: Job, cage: Cage, done_fd: int) -> int:
    for name in [name for name in sys.modules if name.partition(".")[0] == "relax"]:
        del sys.modules[name]
    sys.path.extend(cage.packages)
    sys.argv = ["program.py"]
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(compile(job.source, "program.py", "exec"), module.__dict__)
        if job.check is not None:
            exec(compile(job.check, "check.py", "exec"), module.__dict__)
            os.write(done_fd, PASSED)
            os._exit(0)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at a program's end
        traceback.print_exc(limit=-3)
        return 1
    # Threads that still run are part of the program, as in a script.
    import threading  # here, since the supervisor forks and needs none itself

    threading._shutdown()  # type: ignore[attr-defined]
    return code & 0xFF
