"""A view of the machine that holds nothing but a program's own: namespaces of mounts, processes, network, IPC and users.

Root makes them itself; anybody else gets them with a namespace of users, where the kernel allows that.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from relax.rewards.sandbox.kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    bind_read_only,
    mount,
    pivot_root,
    unmount,
    unshare,
)

FOLDER = "/box"  # where a program runs and may write
_ALL = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
_NEW_ROOT = "/sys"  # any folder that is there on every machine: what is mounted on it is seen in the new namespace only
_DEVICES = ("null", "zero", "full", "random", "urandom")


def leave_the_others() -> bool:
    """New namespaces for this process and its later children. Returns whether this is real root, who has to become another.

    Raises `OSError` when the kernel allows none of it.
    """
    if os.geteuid() == 0:
        try:
            unshare(_ALL)
            return True
        except PermissionError:
            pass  # root inside a container: a namespace of users may be allowed all the same
    uid, gid = os.geteuid(), os.getegid()
    unshare(_ALL | CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    return False


def build_root(readable: Sequence[str]) -> bool:
    """A new root with the folders `readable` (read-only), a few devices, and `FOLDER`; the old one is gone afterwards.

    Returns whether `/proc` could be mounted, which containers may forbid. Raises `OSError`. To be called in the new
    namespace of processes, as its first process.
    """
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("none", _NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    for path in readable:
        if Path(path).is_symlink():
            _parent(path).mkdir(parents=True, exist_ok=True)
            Path(_NEW_ROOT + path).symlink_to(Path(path).readlink())
        else:
            _bind(path)
    Path(f"{_NEW_ROOT}/dev").mkdir()
    for name in _DEVICES:
        if Path(f"/dev/{name}").exists():
            Path(f"{_NEW_ROOT}/dev/{name}").touch()
            mount(f"/dev/{name}", f"{_NEW_ROOT}/dev/{name}", "", MS_BIND)
    for name in ("proc", FOLDER.strip("/")):
        Path(f"{_NEW_ROOT}/{name}").mkdir()
    for name in ("tmp", "dev/shm"):
        if not Path(f"{_NEW_ROOT}/{name}").exists():  # it does when Python itself lies below it
            Path(f"{_NEW_ROOT}/{name}").symlink_to(FOLDER)
    try:
        mount("proc", f"{_NEW_ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        has_proc = True
    except PermissionError:
        has_proc = False
    pivot_root(_NEW_ROOT)
    mount("", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    return has_proc


def fresh_folder(size_mib: int) -> None:
    """An empty `FOLDER`, in memory, of this size."""
    mount("none", FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size_mib}m,mode=0777,nr_inodes=4096")


def drop_folder() -> None:
    """Takes `FOLDER`'s content away."""
    unmount(FOLDER)


def _parent(path: str) -> Path:
    return Path(_NEW_ROOT + path).parent


def _bind(path: str) -> None:
    target = Path(_NEW_ROOT + path)
    if Path(path).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    bind_read_only(path, str(target))
