"""System calls that Python does not have, through the C library. Linux only."""

import ctypes
import os
import platform
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_MACHINES = ("x86_64", "aarch64")
MACHINE = platform.machine()

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 4, 22, 38, 24


def is_known_machine() -> bool:
    """Whether the numbers of this machine's system calls are known here."""
    return MACHINE in _MACHINES


def call(name: str, *arguments: Any) -> int:
    """A function of the C library. Raises `OSError` with its name when it returns -1."""
    result = int(getattr(_libc, name)(*arguments))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
    return result


def syscall(what: str, number: int, *arguments: Any) -> int:
    """System call `number`; `what` names it in the `OSError` that it raises when it fails."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def unshare(flags: int) -> None:
    """Puts this process (or, for process ids, its later children) into new namespaces."""
    call("unshare", flags)


def prctl(option: int, *values: int) -> int:
    """`prctl(option, ...)` with up to four whole numbers."""
    return call("prctl", option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """`mount(2)`; empty texts stand for none."""
    texts = [text.encode() or None for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), options.encode() or None)


def bind_read_only(source: str, target: str) -> None:
    """Shows `source`, with all that is mounted below it, at `target`, where nobody can write. Needs Linux 5.12."""
    mount(source, target, "", MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(0x1 | 0x2, 0, 0, 0)  # read-only, no set-user-id
    syscall(
        "mount_setattr",
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes),
        ctypes.c_size_t(32),
    )


def unmount(target: str) -> None:
    """Takes a mount away, at once and whoever uses it."""
    call("umount2", target.encode(), _MNT_DETACH)


def pivot_root(new_root: str) -> None:
    """Makes `new_root` the root of this mount namespace; nothing outside it can be reached afterwards."""
    os.chdir(new_root)
    syscall("pivot_root", _SYS_PIVOT_ROOT[MACHINE], b".", b".")
    unmount(".")
    os.chdir("/")


def drop_capabilities() -> None:
    """Gives up every capability of this thread, and what a program could get of them by `exec`."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one, or none may be dropped as there are none
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
