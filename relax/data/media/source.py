"""Where the bytes of an item are, as its `Media.source` says it, and how they are read.

"/data/images/3.jpg"     a file inside one of the data's roots, links followed
"https://host/3.jpg"     an address, if the run allows it
"spool:4096:1200"        bytes that came inside a row: offset and length in the spool
"""

import base64
import binascii
import hashlib
import http.client
import io
import os
import stat
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from relax.config.media import MediaConfig
from relax.data.media.decoded import Unreadable
from relax.types import Media

# First bytes of media files, at offset 0 or 4: what makes a long word of base64 more than a file's name.
MAGIC = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*"),
    *(b"OggS", b"fLaC", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\x1aE\xdf\xa3"),
)
MAGIC_AT_4 = (b"ftyp",)
SHORTEST_BASE64 = 64
FETCH_S = 30.0  # without a byte of a server
HTTP = (
    *(urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler, urllib.request.UnknownHandler),
    *(urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor, urllib.request.HTTPDefaultErrorHandler),
)


class Spool:
    """Bytes that came inside rows, on disk and not in memory, each once. The file has no name and ends with its processes."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the data are
        self._places: dict[bytes, str] = {}

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def keep(self, content: bytes) -> str:
        """The source of `content` from now on."""
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if digest not in self._places:
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(content)
            self._file.flush()
            self._places[digest] = f"spool:{offset}:{len(content)}"
        return self._places[digest]


class Finder:
    """From what a row holds to a `Media`. `folder`: the root where the configuration names none."""

    def __init__(self, config: MediaConfig, folder: str, spool: Spool) -> None:
        self._config, self._spool = config, spool
        self._roots = [os.path.realpath(root) for root in config.roots or [folder]]
        self._kinds = {"image": config.image, "audio": config.audio, "video": config.video}

    def find(self, kind: str, raw: Any) -> Media:
        """Raises `Unreadable` when `raw` names no file inside the roots, or is nothing that could be one.

        Takes bytes, a text (path, data URL, base64, address), a number (for `file`), or an object with "bytes", "path", "url"
        or "base64".
        """
        if isinstance(raw, Mapping):
            given = [name for name in ("bytes", "base64", "url", "path") if raw.get(name) is not None]
            if not given:
                raise Unreadable(f"an object with bytes, path, url or base64 is needed, and it has {sorted(map(str, raw))}")
            return self._find(kind, raw[given[0]], str(raw.get("path") or given[0]), is_base64=given[0] == "base64")
        return self._find(kind, raw, "bytes")

    def _find(self, kind: str, raw: Any, name: str, *, is_base64: bool = False) -> Media:
        if isinstance(raw, bytes | bytearray):
            return self._keep(kind, bytes(raw), name)
        if isinstance(raw, bool) or not isinstance(raw, str | int):
            raise Unreadable(f"a path, bytes or an address is needed, and it is {type(raw).__name__} {str(raw)[:40]!r}")
        text = str(raw)
        if is_base64 or text[:5].lower() == "data:":
            return self._keep(kind, _decode(text if is_base64 else _data_url(text)), "base64" if is_base64 else "data URL")
        if text[:8].lower().startswith(("http://", "https://")):
            if not self._config.allow_http:
                raise Unreadable(f"{_short(text)} is an address, and media.allow_http = false")
            return Media(kind, text)
        path = self._kinds[kind].path_of(text)
        try:
            return Media(kind, self._file(path))
        except Unreadable:
            if (content := _bare_base64(text)) is not None:
                return self._keep(kind, content, "base64")
            raise

    def _file(self, path: str) -> str:
        is_outside = False
        for root in self._roots:
            try:
                real = os.path.realpath(os.path.join(root, path))  # noqa: PTH118 - Path.resolve is ten times slower
                found = os.stat(real)  # noqa: PTH116
            except (OSError, ValueError):
                continue
            if all(os.path.commonpath([other, real]) != other for other in self._roots):
                is_outside = True
                continue
            if not stat.S_ISREG(found.st_mode):
                raise Unreadable(f"{_short(path)} is not a file")
            _check_size(found.st_size, self._config)
            return real
        if is_outside:
            raise Unreadable(f"{_short(path)} lies outside of {' and '.join(self._roots)} (media.roots)")
        raise Unreadable(f"there is no file {_short(path)} in {' or '.join(self._roots)} (media.roots)")

    def _keep(self, kind: str, content: bytes, name: str) -> Media:
        _check_size(len(content), self._config)
        return Media(kind, self._spool.keep(content), {"name": name})


def open_source(media: Media, config: MediaConfig, spool_fd: int) -> BinaryIO:
    """The bytes of one item. Raises `Unreadable`, or `OSError`."""
    scheme, _, rest = media.source.partition(":")
    if scheme == "spool":
        offset, size = map(int, rest.split(":"))
        return io.BytesIO(os.pread(spool_fd, size, offset))
    if scheme.lower() in ("http", "https") and config.allow_http:
        return io.BytesIO(_fetch(media.source, config))
    # What was a file when the rows were read may be something else by now: opening a pipe must not hang.
    file = os.fdopen(os.open(media.source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        file.close()
        raise Unreadable("it is no longer a file")
    _check_size(found.st_size, config)
    return file


def shown(media: Media) -> str:
    """The item's name in an error."""
    return str(media.metadata.get("name") or _short(media.source))


def _fetch(url: str, config: MediaConfig) -> bytes:
    opener = urllib.request.OpenerDirector()  # of http and https alone: a redirection must not lead to a file
    for handler in HTTP:
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=FETCH_S) as answer:
            content: bytes = answer.read(config.max_file_bytes + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreadable(f"it cannot be fetched: {error}") from None
    _check_size(len(content), config)
    return content


def _check_size(size: int, config: MediaConfig) -> None:
    if size == 0:
        raise Unreadable("it is empty")
    if size > config.max_file_bytes:
        raise Unreadable(f"it has {size} bytes, and {config.max_file_bytes} are allowed (media.max_file_bytes)")


def _data_url(text: str) -> str:
    head, comma, body = text.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise Unreadable(f"a data URL must be data:TYPE;base64,..., and begins with {_short(head)}")
    return urllib.parse.unquote(body) if "%" in body else body


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unreadable(f"it is not base64: {error}") from None


def _bare_base64(text: str) -> bytes | None:
    if len(text) < SHORTEST_BASE64:
        return None
    try:
        content = _decode(text)
    except Unreadable:
        return None
    return content if content.startswith(MAGIC) or content[4:8] in MAGIC_AT_4 else None


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}")


def as_list(raw: Any) -> Sequence[Any]:
    """The items of a media column: one, several or none."""
    if raw is None or (isinstance(raw, str) and not raw):
        return []
    return raw if isinstance(raw, list | tuple) else [raw]
