"""Files of one JSON object a line, written while others read them, and left torn when a process is killed."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax.errors import DataError

Row = dict[str, Any]


def finite(value: Any) -> Any:
    """`value` as JSON holds it: numbers that are not finite become null, numpy scalars and arrays become plain values."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return str(value)


def read_rows(path: Path) -> list[Row]:
    """The objects of a file, none when there is no such file. A last line that is not complete yet is left out.

    Raises `DataError` with file and line for anything else that is not a JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line break is being written, or torn
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: not a JSON object but {type(row).__name__}")
        rows.append(row)
    return rows


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class JsonLines:
    """Appends objects to a file, each complete before the next. A torn last line is cut off when it is opened.

    `keep`: which of the rows that are there stay. Default: all.
    """

    def __init__(self, path: Path, keep: Callable[[Row], bool] | None = None) -> None:
        self.path = path
        if path.exists():
            self._mend(keep)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = os.fstat(self._fd).st_size

    def append(self, row: Mapping[str, Any]) -> None:
        """Raises `OSError` when the disk is full; the file then ends with its last complete line."""
        data = memoryview(json.dumps(finite(row), allow_nan=False).encode() + b"\n")
        size = len(data)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += size

    def close(self) -> None:
        os.close(self._fd)

    def _mend(self, keep: Callable[[Row], bool] | None) -> None:
        if keep is None:
            data = self.path.read_bytes()
            if data and not data.endswith(b"\n"):
                os.truncate(self.path, data.rfind(b"\n") + 1)
            return
        rows = [row for row in read_rows(self.path) if keep(row)]
        write_atomically(self.path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
