"""From one raw row (a dict) to a `Prompt`, or to the reason why it cannot be one."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relax.data.media.rows import MediaRows, Mismatch, read_part
from relax.types import Prompt

ROLES = ("system", "user", "assistant", "tool")
# What ShareGPT-like rows call them, under "from" beside "value".
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}


class BadRow(Exception):
    """Why a row is malformed. Becomes a `DataError` with the place, or a count, as `data.on_bad_row` says."""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads rows as `[data]` describes their columns. Without `media` the rows are text alone."""

    prompt_key: str
    answer_key: str | None
    chat_template: bool
    media: MediaRows | None = None

    def read(self, row: Any, key: str) -> Prompt:
        """The prompt of one row; the columns that are neither prompt nor answer become its metadata. Raises `BadRow`."""
        if not isinstance(row, Mapping):
            raise BadRow(f"a row must be an object with named columns, and is {_kind(row)}")
        if self.prompt_key not in row:
            raise BadRow(missing_column(self.prompt_key, row))
        raw = row[self.prompt_key]
        known = (self.prompt_key, self.answer_key, *(self.media.columns if self.media is not None else ()))
        rest = {str(name): value for name, value in row.items() if name not in known}
        answer = row.get(self.answer_key) if self.answer_key is not None else None
        if isinstance(raw, str):
            text = _text(raw, f"{self.prompt_key!r}")
            if self.chat_template:
                return self._prompt(key, row, ({"role": "user", "content": text},), answer, rest)
            if self.media is not None and self.media.has_items(row):
                raise BadRow("it has media, which need data.chat_template = true")
            return Prompt(key, text=text, answer=answer, metadata=rest)
        if not isinstance(raw, Sequence) or isinstance(raw, bytes):
            raise BadRow(f"{self.prompt_key!r} must be a text or a list of chat messages, and is {_kind(raw)}")
        if not self.chat_template:
            raise BadRow(f"{self.prompt_key!r} is a list of chat messages, and data.chat_template = false needs a text")
        messages = read_messages(raw, self.prompt_key, with_media=self.media is not None)
        if messages[-1]["role"] not in ("user", "tool"):
            raise BadRow(f"the last message is the {messages[-1]['role']}'s, so there is nothing to respond to")
        return self._prompt(key, row, messages, answer, rest)

    def _prompt(
        self, key: str, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], answer: Any, rest: dict[str, Any]
    ) -> Prompt:
        if self.media is None:
            return Prompt(key, messages=tuple(messages), answer=answer, metadata=rest)
        try:
            parts, media = self.media.read(row, messages)
        except Mismatch as why:
            raise BadRow(str(why)) from why
        rest = msgspec.to_builtins(rest)  # bytes in other columns, as they are without media
        return Prompt(key, messages=tuple(parts), answer=answer, metadata=rest, media=tuple(media))


def read_messages(raw: Sequence[Any], column: str, *, with_media: bool = False) -> tuple[Mapping[str, Any], ...]:
    """The chat messages in `column`, with `role` and `content`: a text, or a list of parts where media are read and a message
    has some. Raises `BadRow`."""
    if not raw:
        raise BadRow(f"{column!r} is an empty list of chat messages")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(raw, 1):
        if not isinstance(message, Mapping):
            raise BadRow(f"message {number} must be an object with role and content, and is {_kind(message)}")
        kept = {str(name): value for name, value in message.items() if value is not None}  # parquet fills in null
        if "role" not in kept and "from" in kept:
            speaker = kept.pop("from")
            kept |= {"role": SPEAKERS.get(str(speaker), speaker), "content": kept.pop("value", None)}
        role = kept.get("role")
        if role not in ROLES:
            near = difflib.get_close_matches(str(role), [*ROLES, *SPEAKERS], 1, 0.6)
            hint = SPEAKERS.get(near[0], near[0]) if near else ""
            raise BadRow(
                f"message {number} has the role {role!r}: allowed are {', '.join(ROLES)}"
                + (f"; did you mean {hint!r}?" if hint else "")
            )
        parts = _parts(kept.get("content"), number, role) if with_media else None
        kept["content"] = parts or _content(kept.get("content"), number, role, bool(kept.get("tool_calls")))
        messages.append(kept)
    return tuple(messages)


def _parts(content: Any, number: int, role: str) -> list[dict[str, Any]] | None:
    """The parts of a content that holds media; None for any other, which `_content` reads."""
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return None
    parts = [read_part(part) if isinstance(part, Mapping) else None for part in content]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or all(part["type"] == "text" for part in found):
        return None
    if role == "assistant":
        raise BadRow(f"message {number} is the assistant's and has media, which no model here gives")
    return [_text_part(part, number) for part in found if part["type"] != "text" or part["text"]]


def _text_part(part: dict[str, Any], number: int) -> dict[str, Any]:
    if part["type"] == "text" and part["text"].strip():
        _text(part["text"], f"message {number}")
    return part


def _content(content: Any, number: int, role: str, has_tool_calls: bool) -> str:
    if isinstance(content, str):
        return _text(content, f"message {number}") if role == "user" else content
    if content is None and has_tool_calls:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        kinds = [part.get("type") if isinstance(part, Mapping) else _kind(part) for part in content]
        if any(kind != "text" for kind in kinds):
            raise BadRow(f"message {number} has content of the kinds {kinds}, and only text can be rendered")
        return _text("".join(str(part.get("text", "")) for part in content), f"message {number}")
    raise BadRow(f"message {number} must have a text as content, and has {_kind(content)}")


def missing_column(name: str, row: Mapping[Any, Any]) -> str:
    """Says which column is missing, which there are, and which was probably meant."""
    return f"there is no column {name!r} (data.prompt_key); {nearest(name, [str(column) for column in row])}"


def nearest(name: str, columns: Sequence[str]) -> str:
    """Which columns there are, and which was probably meant."""
    near = difflib.get_close_matches(name, columns, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"it has {', '.join(map(repr, columns)) or 'none'}{hint}"


def _text(text: str, what: str) -> str:
    if not text.strip():
        raise BadRow(f"{what} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{what} holds half a surrogate pair at character {error.start}, which is not text") from error
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
