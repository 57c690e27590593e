"""Telling a living process from a dead one whose number was given to another."""

import os
from typing import NamedTuple

import psutil


class ProcessId(NamedTuple):
    """A process: its number and when it started, in whole hundredths of a second since 1970."""

    pid: int
    start: int

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        return _start_of(self.pid) == self.start

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}"


def this_process() -> ProcessId:
    """The process that asks."""
    start = _start_of(os.getpid())
    assert start is not None, "this process runs"
    return ProcessId(os.getpid(), start)


def parse_process(text: str) -> ProcessId | None:
    """The inverse of `str(ProcessId)`; `None` for other texts."""
    pid, _, start = text.partition("-")
    return ProcessId(int(pid), int(start)) if pid.isdigit() and start.isdigit() else None


def _start_of(pid: int) -> int | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
    except psutil.NoSuchProcess:
        return None
