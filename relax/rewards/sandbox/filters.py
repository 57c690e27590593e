"""What the kernel refuses a program: system calls (seccomp) and files (Landlock). Neither needs root or namespaces."""

import ctypes
import errno
import os
from collections.abc import Sequence

from relax.rewards.sandbox.kernel import MACHINE, PR_SET_SECCOMP, prctl, syscall

# (x86_64, aarch64)
_FORBIDDEN = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount_setattr": (442, 442),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),  # would get round this filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),  # memory that counts as nobody's
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265),
    "reboot": (169, 142),
    "swapon": (167, 224),
}
# Without namespaces: what reaches other processes, and changes of files that Landlock does not see. 0: there is no such call.
_FORBIDDEN_AMONG_OTHERS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "process_mrelease": (448, 448),
    "chmod": (90, 0),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, 0),
    "lchown": (94, 0),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "utime": (132, 0),
    "utimes": (235, 0),
    "futimesat": (261, 0),
    "utimensat": (280, 88),
}
_FORK = {"x86_64": (57, 58), "aarch64": ()}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3, _PRLIMIT = 435, {"x86_64": 302, "aarch64": 261}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES, _CLONE_THREAD = 0x7E020000, 0x00010000

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE, _NOT_THERE = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

_READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute, read a file, list a folder
_READ_FILE = (1 << 0) | (1 << 2)
LEAST_LANDLOCK = 3  # earlier ones let files be cut to nothing
_ALL_RIGHTS = {3: (1 << 15) - 1, 4: (1 << 15) - 1}  # from 5 on one more


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("fd", ctypes.c_int32))


def refuse_system_calls(*, among_others: bool) -> None:
    """No sockets, no tracing, no mounts or namespaces, no memory that belongs to nobody; calls that do so fail with `EPERM`.

    With `among_others` neither signals nor new processes (threads are allowed), nor changes of owners, modes, times and
    attributes of files. Needs `no_new_privs`. Raises `OSError`.
    """
    column = ("x86_64", "aarch64").index(MACHINE)
    numbers = [row[column] for row in _FORBIDDEN.values()]
    if among_others:
        numbers += [row[column] for row in _FORBIDDEN_AMONG_OTHERS.values() if row[column]] + list(_FORK[MACHINE])
    lines = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT_ARCH[MACHINE]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if MACHINE == "x86_64":
        lines += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # the same calls under other numbers
    for number in numbers:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    # clone3 has its flags in memory, which a filter cannot see: C libraries then take clone.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _NOT_THERE)]
    lines += [(_EQUAL, 0, 3, _PRLIMIT[MACHINE]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
    lines += [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 1, 0, _CLONE[MACHINE]), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_HAS_BITS, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _REFUSE)]
    if among_others:
        lines += [(_HAS_BITS, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _REFUSE)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    array = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _Program(len(lines), array)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 without one."""
    try:
        return syscall("landlock_create_ruleset", 444, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def allow_files(readable: Sequence[str], writable: str) -> None:
    """Only files below `readable` may be read, only those below `writable` be changed. Needs `no_new_privs`.

    Raises `OSError`.
    """
    version = landlock_version()
    rights = _ALL_RIGHTS.get(version, (1 << 16) - 1)
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # no TCP; no signals or abstract sockets outside
    attributes = (ctypes.c_uint64 * 3)(rights, network, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = syscall("landlock_create_ruleset", 444, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ if os.path.isdir(path) else _READ_FILE)  # noqa: PTH112 - pathlib is slow to import
        for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
            _allow(ruleset, device, _READ_FILE | (1 << 1))
        _allow(ruleset, writable, rights)
        syscall("landlock_restrict_self", 446, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscall("landlock_add_rule", 445, ruleset, 1, ctypes.byref(_Beneath(rights, fd)), 0)
    finally:
        os.close(fd)
