"""A box, from outside: start it, give it programs, close it.

with open_box("best") as box:
    box.run(Job("print(int(input()) + 1)", stdin="41"))     # Ran(ok=True, stdout="42\n")
"""

import os
import select
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Literal

import relax
from relax.errors import RewardError
from relax.rewards.sandbox import jobs
from relax.rewards.sandbox.jobs import Job, Level, Ran, Setup

START_LIMIT_S = 20.0
GRACE_S = 10.0  # beyond a program's own limit, for a busy machine
DESCRIPTIONS: dict[Level, str] = {
    "namespaces": "namespaces of their own (no network, no files or processes of others)",
    "filters": "filters (no network, no files of others, no processes besides their own)",
}
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache")
# -P: neither this folder nor the working directory is searched for modules. The package is found, then forgotten.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); import relax.rewards.sandbox.inside as inside; sys.path.pop(0); inside.main()"
)


class SandboxError(RewardError):
    """The box itself failed: nothing is known of the program."""


class Box:
    """One box of one level. Not thread-safe: one program runs at a time. Starts again by itself when it was lost."""

    def __init__(self, level: Level, *, site_packages: bool = False) -> None:
        self.level = level
        packages = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")}) if site_packages else []
        self._setup = Setup(level, _readable(packages), packages)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Box":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the box, unless it runs. Raises `SandboxError` when this machine has not what it takes."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-c", _BOOT, str(Path(relax.__file__).parent.parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),  # nothing of the run's own
            )
            self._ask(self._setup, START_LIMIT_S)
        except OSError as error:
            raise SandboxError(f"a box cannot be started: {error}") from error

    def run(self, job: Job) -> Ran:
        """Runs one program. Raises `SandboxError` when the box fails; whatever the program does is in what is returned."""
        self.start()
        return Ran(**self._ask(job, job.limits.wall_s + GRACE_S))

    def close(self) -> None:
        """Ends the box and all that runs in it. Idempotent."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
        except OSError:
            pass  # it is gone already
        process.stdout.close()
        try:
            process.wait(1.0)  # it sees the closed end, and takes its folder away
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, message: Setup | Job, limit_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        until = time.monotonic() + limit_s
        try:
            jobs.write(self._process.stdin.fileno(), message)
            fd = self._process.stdout.fileno()
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise SandboxError(f"the box did not answer within {limit_s:g} s")
            answer = jobs.read(fd)
        except (OSError, ValueError) as error:
            self.close()
            raise SandboxError(f"the box ended: {error}") from error
        except SandboxError:
            self.close()
            raise
        if answer is None:
            self.close()
            raise SandboxError("the box ended without an answer")
        if "error" in answer:
            self.close()
            raise SandboxError(str(answer["error"]))
        return answer


def open_box(isolation: Literal["best", "namespaces", "filters"], *, site_packages: bool = False) -> Box:
    """A box that has run a first program. `best`: of namespaces where there are any, else of filters.

    Raises `SandboxError`, with the reasons, when there can be none.
    """
    levels: tuple[Level, ...] = ("namespaces", "filters") if isolation == "best" else (isolation,)
    reasons = []
    for level in levels:
        box = Box(level, site_packages=site_packages)
        try:
            ran = box.run(Job("import json, math, sys\nprint(json.loads(sys.stdin.read())[0] + 1)", stdin="[41]"))
            if ran.ok and ran.stdout == "42\n":
                return box
            reasons.append(f"{level}: a first program failed: {ran.why}")
        except SandboxError as error:
            reasons.append(f"{level}: {error}")
        box.close()
    raise SandboxError("; ".join(reasons))


def _readable(packages: list[str]) -> list[str]:
    """Folders that a Python program needs, none inside another; links stay links."""
    wanted = [path for path in _SYSTEM if Path(path).exists()]
    for path in (sys.base_prefix, os.path.realpath(sys.base_prefix), *packages):
        if not any(path == other or path.startswith(f"{other}/") for other in wanted):
            wanted.append(path)
    return wanted


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # the same program does the same twice
        "PYTHONDONTWRITEBYTECODE": "1",
        **threads,
    }
