"""Processes of the operating system: which are ours, whether they live, and their end; by process id, never by name."""

import psutil

_END_S = 2.0


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process runs; a zombie, or another one under its number, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def process_of(pid: int) -> psutil.Process | None:
    """The process that has this number now, if there is one."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def kill(process: psutil.Process) -> None:
    """SIGKILL, if it still lives."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def children() -> list[psutil.Process]:
    """All processes below this one."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def family(pids: set[int]) -> list[psutil.Process]:
    """The processes with these numbers, and their children."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found |= {member.pid: member for member in (process, *process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def end(processes: list[psutil.Process]) -> None:
    """Waits for their own end, and kills those that do not come to it."""
    _, alive = psutil.wait_procs(processes, timeout=_END_S)
    for process in alive:
        kill(process)
    psutil.wait_procs(alive, timeout=_END_S)
