"""Raw rows out of jsonl and parquet files, and out of folders that Hugging Face `datasets` saved."""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax.data.rows import BadRow
from relax.errors import DataError

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors write it
ROWS_AT_ONCE = 256  # rows of tables that are Python objects at one time: with images inside they are large

# (name of the place for people, key, the row or why it cannot be read)
RawRow = tuple[str, str, Any | BadRow]


def read_files(path: Path, *, keep_bytes: bool = False) -> Iterator[RawRow]:
    """Every row of a file, or of all files of a folder in the order of their names.

    Lines of jsonl are counted from 1 and blank ones left out; rows of parquet and Arrow files, and of a file that is one JSON
    list, are counted from 0. Binary columns of tables are base64 texts unless `keep_bytes` is true. Raises `DataError` when
    there is nothing to read, or a file is not what its name says.
    """
    for file in _files(path):
        kind = SUFFIXES.get(file.suffix.lower())
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        if kind == "jsonl":
            is_list = file.suffix.lower() == ".json" and _is_list(file)
            yield from _read_list(file, name) if is_list else _read_jsonl(file, name)
        elif kind is not None:
            yield from _read_table(file, name, kind, keep_bytes)
        else:
            raise DataError(f"{file}: unknown kind of file; data.path takes {', '.join(SUFFIXES)} files, or a folder of them")


def _files(path: Path) -> list[Path]:
    if not path.exists():
        near = _near(path) if path.parent.is_dir() else []
        hint = f"; {path.parent} has {', '.join(near)}" if near else ""
        raise DataError(f"data.path = {str(path)!r}: no such file or folder{hint}")
    if path.is_file():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(item.name for item in path.iterdir() if item.is_dir())
        raise DataError(f"data.path = {str(path)!r}: the folder holds several splits; name one of them: {', '.join(splits)}")
    if (path / "state.json").is_file():  # datasets.save_to_disk; the file says which shards belong to it, in order
        try:
            state = json.loads((path / "state.json").read_text("utf-8"))
            found = [path / item["filename"] for item in state["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path / 'state.json'}: not written by datasets.save_to_disk: {error}") from error
        missing = [file for file in found if not file.is_file()]
        if missing:
            raise DataError(f"{missing[0]}: named in {path / 'state.json'}, and missing")
        return found
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise DataError(f"data.path = {str(path)!r}: the folder has no {', '.join(SUFFIXES)} file")
    return found


def _near(path: Path) -> list[str]:
    """What could have been meant: files that can be read and folders beside `path`, the most alike first."""
    names = [item.name for item in path.parent.iterdir() if item.suffix.lower() in SUFFIXES or item.is_dir()]
    shown = sorted(name for name in names if not name.startswith("."))
    return sorted(shown, key=lambda name: -difflib.SequenceMatcher(None, path.name, name).ratio())[:8]


def _is_list(file: Path) -> bool:
    """Whether the file is one JSON list, as many open data sets are: a line of jsonl is an object."""
    try:
        with file.open("rb") as opened:
            return opened.read(64).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _read_list(file: Path, name: str) -> Iterator[RawRow]:
    try:
        rows = json.loads(file.read_bytes().removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: begins as a JSON list, and cannot be read as one: {error}") from error
    for number, row in enumerate(rows):
        yield f"{file}, row {number}", f"{name}:{number}", row


def _read_jsonl(file: Path, name: str) -> Iterator[RawRow]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if not line.strip():
                    continue
                place, key = f"{file}, line {number}", f"{name}:{number}"
                try:
                    yield place, key, json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    yield place, key, BadRow(f"not UTF-8: byte {line[error.start]:#04x} at position {error.start} of the line")
                except RecursionError:
                    yield place, key, BadRow("not JSON that can be read: it is nested too deeply")
                except ValueError as error:  # a number of too many digits is a plain ValueError
                    hint = (
                        "; the file holds one JSON document, and one a line is needed" if number == 1 and _is_open(line) else ""
                    )
                    what = (
                        f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
                    )
                    yield place, key, BadRow(f"not JSON: {what}{hint}")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _is_open(line: bytes) -> bool:
    return line.strip() in (b"[", b"{")


def _read_table(file: Path, name: str, kind: str, keep_bytes: bool) -> Iterator[RawRow]:
    import pyarrow as pa  # heavy: only for these kinds of files
    import pyarrow.parquet as pq

    number = 0
    try:
        if kind == "parquet":
            batches = pq.ParquetFile(file).iter_batches(ROWS_AT_ONCE)
        else:
            batches = pa.ipc.open_stream(pa.memory_map(str(file)))
        kept = (bytes,) if keep_bytes else ()
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                rows = batch.slice(start, ROWS_AT_ONCE).to_pylist()
                for row in msgspec.to_builtins(rows, builtin_types=kept):  # dates and decimals as JSON has them: as texts
                    yield f"{file}, row {number}", f"{name}:{number}", row
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: not a readable {kind} file after row {number}: {error}") from error
