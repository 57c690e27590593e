"""What a box is asked and what it answers: JSON behind a length of four bytes. Plain, since the inside has no libraries."""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["namespaces", "filters"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one program's run. `cpu_s` holds for each of its processes, `memory_mib` for each and for their sum."""

    cpu_s: float = 2.0
    wall_s: float = 4.0
    memory_mib: int = 512
    disk_mib: int = 16
    max_processes: int = 16
    max_output_bytes: int = 1 << 18


@dataclass(frozen=True, slots=True)
class Setup:
    """First message into the box: how it is closed, and which folders can be read inside."""

    level: Level
    readable: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)  # of these, those where programs may import from


@dataclass(frozen=True, slots=True)
class Job:
    """One run: `source` with `stdin`; then `check`, in the same module, when there is one."""

    source: str
    stdin: str = ""
    check: str | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended. `ok`: with exit status 0, and, with a check, after all of it. `why`: the limit that it ran into, the
    signal, or the last lines of standard error."""

    ok: bool
    stdout: str = ""
    why: str = ""
    is_late: bool = False


def write(fd: int, message: Any) -> None:
    """Sends a dataclass or a dict."""
    body = json.dumps(message if isinstance(message, dict) else asdict(message)).encode("utf-8", "surrogatepass")
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(fd, data) :]


def read(fd: int) -> dict[str, Any] | None:
    """The next message; None when the other side is gone."""
    head = _exactly(fd, 4)
    body = None if head is None else _exactly(fd, int.from_bytes(head, "little"))
    return None if body is None else json.loads(body)


def _exactly(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
