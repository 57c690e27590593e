"""`relax train` as a process of its own, watched from outside: its rows, its processes, what is left of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def training(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """`relax train` in a session of its own, so that signals can reach its whole group; ended with all its processes."""
    command = [sys.executable, "-m", "relax.cli.main", "train", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ.copy(),
    )
    try:
        yield process
    finally:
        for member in family(process.pid):
            try:
                member.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait(10)


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def member(process: subprocess.Popen[str], title: str) -> psutil.Process:
    """The one process of the run whose command line holds `title` (Ray names its workers after what they run)."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = []
        for one in family(process.pid):
            try:
                if title in " ".join(one.cmdline()):
                    found.append(one)
            except psutil.Error:
                continue
        if len(found) == 1:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"{title}: {found} of {[one.cmdline() for one in family(process.pid)]}")


def left_in_memory() -> set[str]:
    """Shared-memory files of relax whose process is gone: other runs on this machine may have theirs."""
    names = {file.name for file in Path("/dev/shm").iterdir() if "relax" in file.name}
    return {name for name in names if not any(psutil.pid_exists(int(number)) for number in re.findall(r"\d+", name)[:1])}


def rows(run_dir: Path) -> list[dict[str, float]]:
    return lines(run_dir / "metrics.jsonl")


def events(run_dir: Path, kind: str) -> list[dict]:
    return [event for event in lines(run_dir / "events.jsonl") if event["kind"] == kind]


def lines(file: Path) -> list[dict]:
    """The complete lines of a file that is being written."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while len(rows(run_dir)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.1)


def kill_and_wait(process: subprocess.Popen[str], run_dir: Path, title: str, timeout_s: float = 90) -> float:
    """SIGKILL to one part of a run; seconds until the next step ended after the part was back."""
    before = len(events(run_dir, "recovery"))
    started = time.monotonic()
    os.kill(member(process, title).pid, signal.SIGKILL)
    after: int | None = None
    while True:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() - started < timeout_s, f"{title} did not come back"
        done = int(rows(run_dir)[-1]["step"]) if rows(run_dir) else 0
        if after is None and len(events(run_dir, "recovery")) > before:
            after = done
        elif after is not None and done > after:
            return time.monotonic() - started
        time.sleep(0.1)


def assert_all_gone(processes: list[psutil.Process], within_s: float = 5) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert not alive, f"left behind: {[(p.pid, p.name()) for p in alive]}"


def state(run_dir: Path) -> str:
    return str(json.loads((run_dir / "state.json").read_text())["state"])
