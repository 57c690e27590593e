"""A run's folder: where everything lies, and typed access for those who read it while the run goes on, or later.

config.json  state.json  metrics.jsonl  eval.jsonl  events.jsonl  stats.json  samples/  checkpoints/  hf/  tb/  log/
ledger.sqlite  plot.png
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from relax.config.run import RunConfig
from relax.errors import ConfigError, DataError
from relax.observe.jsonl import Row, read_rows, write_atomically
from relax.observe.ledger_file import LedgerFile

State = Literal["running", "finished", "stopped", "failed", "unknown"]

_LOCK_FILE = ".lock"
_LOCK_S = 0.5  # `state` holds the lock for an instant when it looks whether somebody else does
_FILES = ("config.json", "state.json", "metrics.jsonl", "eval.jsonl", "events.jsonl", "stats.json", "plot.png")
_FOLDERS = ("samples", "checkpoints", "reference", "critic", "hf", "tb", "log")


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run stands. `step`: finished steps when this was written; `time`: when, in seconds since 1970."""

    state: State
    pid: int = 0
    step: int = 0
    message: str = ""
    time: float = 0.0


class RunFolder:
    """One run's folder; making the object touches nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    # -- the one who runs ---------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for this process. Raises `ConfigError` with the other's pid while another run holds it.

        The lock is the kernel's: it ends with the process, however that ends.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.path}: the run folder cannot be written ({error.strerror}); set run.dir") from error
        try:
            deadline = time.monotonic() + _LOCK_S
            while not _try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    pid = os.pread(fd, 32, 0).decode() or "unknown"
                    raise ConfigError(
                        f"{self.path} is in use by another run (process {pid}): wait for it, or choose another run.name"
                    )
                time.sleep(0.02)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(fd)

    def has_run(self) -> bool:
        """Whether there is anything that a new run would mix itself with."""
        return any((self.path / name).exists() for name in (*_FILES, *_FOLDERS, "ledger.sqlite"))

    def clear(self) -> None:
        """Removes what a run writes, and nothing else."""
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob("ledger.sqlite*"):
            file.unlink(missing_ok=True)
        for name in _FOLDERS:
            if (self.path / name).exists():
                shutil.rmtree(self.path / name)

    def write_config(self, config: RunConfig) -> None:
        """Keeps the configuration with every default filled in."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.json", config.model_dump_json(indent=2).encode() + b"\n")

    def set_state(self, state: State, step: int, message: str = "") -> None:
        """Says how the run stands, atomically; this process is named as its owner."""
        value = RunState(state, os.getpid(), step, message, time.time())
        write_atomically(self.path / "state.json", json.dumps(asdict(value)).encode() + b"\n")

    # -- those who read -----------------------------------------------------------------------------------------------
    def check_is_run(self) -> None:
        """Raises `ConfigError` when this is not the folder of a run."""
        if (self.path / "config.json").is_file():
            return
        if not self.path.is_dir():
            raise ConfigError(
                f"{self.path} is not a run folder: {'it is a file' if self.path.exists() else 'there is no such folder'}"
            )
        inside = sorted(
            child.parent.name for child in self.path.glob("*/config.json") if (child.parent / "state.json").exists()
        )
        hint = f"; these in it are: {', '.join(inside[:8])}" if inside else ""
        raise ConfigError(f"{self.path} is not a run folder: it has no config.json{hint}")

    def state(self) -> RunState:
        """How the run stands; one that says it is running while no process holds its folder has failed."""
        values = self._json("state.json")
        if values is None:
            return RunState("unknown")
        state = RunState(**values)
        if state.state == "running" and not self._is_locked():
            message = f"process {state.pid} ended without saying why; it was killed, or the machine stopped"
            return RunState("failed", state.pid, state.step, message, state.time)
        return state

    def config(self) -> dict[str, Any]:
        """The run's configuration, or nothing when there is none."""
        return self._json("config.json") or {}

    def metrics(self) -> list[Row]:
        """One row for each finished step, in order."""
        return read_rows(self.path / "metrics.jsonl")

    def evaluations(self) -> list[Row]:
        """One row for each evaluated step, in order; the newest where a resumed run evaluated a step again."""
        return [row for _, row in sorted({row["step"]: row for row in read_rows(self.path / "eval.jsonl")}.items())]

    def events(self) -> list[Row]:
        return read_rows(self.path / "events.jsonl")

    def stats(self) -> dict[str, Any]:
        """The transfer queue's last recorded statistics."""
        return self._json("stats.json") or {}

    def checkpoints(self) -> list[str]:
        """Names of the checkpoint folders, oldest first. A folder under a temporary name is not one."""
        found = [(re.fullmatch(r"step_(\d+)", path.name), path.name) for path in (self.path / "checkpoints").glob("step_*")]
        return [name for _, name in sorted((int(match[1]), name) for match, name in found if match)]

    def ledger_counts(self) -> dict[str, int] | None:
        """Issues by fate, and `issued`, their sum; none before the ledger is there."""
        return LedgerFile(self.path).counts()

    def _json(self, name: str) -> dict[str, Any] | None:
        file = self.path / name
        try:
            value = json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{file}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{file}: not a JSON object but {type(value).__name__}")
        return value

    def _is_locked(self) -> bool:
        try:
            fd = os.open(self.path / _LOCK_FILE, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
