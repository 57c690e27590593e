"""Media of one row: its columns, the places in its messages, and that the two agree.

A text such as `<image>` is a place only in rows that have images, and only where messages of the user or of tools have no
media parts of their own; anywhere else it is text like any other.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax.config.media import MediaConfig
from relax.data.media.decoded import Unreadable
from relax.data.media.source import Finder, as_list
from relax.types import Media

PLACES = re.compile("<(image|audio|video)>")
SPOKEN_BY = ("user", "tool")  # whose texts may have places
# How content parts name what they show, beside "image", "audio" and "video": in OpenAI's API, and in processors' examples.
PART_KINDS = {
    "image": "image", "image_url": "image", "input_image": "image",
    "audio": "audio", "audio_url": "audio", "input_audio": "audio",
    "video": "video", "video_url": "video", "input_video": "video",
}  # fmt: skip
Part = dict[str, Any]


class Mismatch(Exception):
    """Why a row's media do not fit its messages."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an item belongs; `raw`: what the part itself says of it, or None for the next item of the column."""

    kind: str
    raw: Any = None


def forgotten_media(row: Mapping[str, Any], kinds: Collection[str]) -> str | None:
    """What is wrong with a row that is read without `data.media`, for a model that reads `kinds` of media, if anything."""
    for kind, column in MediaConfig().columns.items():
        if kind in kinds and row.get(column):
            return (
                f"is not set, so the {kind}s in the column {column!r} would not be shown to a model that reads {kind}s: set "
                f'media = {{}}, or media = {{ {column} = "another column" }}'
            )
    return None


class MediaRows:
    """Reads the media of rows as `config` describes their columns."""

    def __init__(self, config: MediaConfig, finder: Finder) -> None:
        self._config, self._finder = config, finder

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._config.columns.values())

    def has_items(self, row: Mapping[str, Any]) -> bool:
        """Whether a column of the row has media."""
        return any(as_list(row.get(column)) for column in self.columns)

    def read(self, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Media]]:
        """The messages with a part `{"type": kind}` in each place, and the media in the order of their places.

        `messages` have a text as content, or a list of parts of which some are media (`read_part`). Those without media stay
        as they are. Raises `Mismatch`.
        """
        items = {kind: list(as_list(row.get(column))) for kind, column in self._config.columns.items()}
        has_parts = any(not isinstance(message["content"], str) for message in messages)
        split = [dict(m) if has_parts else {**m, "content": self._split(m, items)} for m in messages]
        self._put_first(split, items)
        places = [part["place"] for message in split for part in _media_parts(message)]
        self._check_counts(items, places)
        media = []
        for number, place in enumerate(places, 1):
            try:
                media.append(self._finder.find(place.kind, items[place.kind].pop(0) if place.raw is None else place.raw))
            except Unreadable as why:
                raise Mismatch(f"{place.kind}, item {number} of {len(places)}: {why}") from why
        return [_plain(message) for message in split], media

    def _split(self, message: Mapping[str, Any], items: Mapping[str, Sequence[Any]]) -> list[Part]:
        """A text as parts, cut at the places of those kinds that the row has."""
        text, parts, done = message["content"], list[Part](), 0
        for match in PLACES.finditer(text) if message["role"] in SPOKEN_BY else ():
            if items[match[1]]:
                parts += [{"type": "text", "text": text[done : match.start()]}, media_part(match[1])]
                done = match.end()
        parts.append({"type": "text", "text": text[done:]})
        return [part for part in parts if part["type"] != "text" or part["text"]]

    def _put_first(self, messages: Sequence[dict[str, Any]], items: Mapping[str, Sequence[Any]]) -> None:
        """Media of a kind without any place come before the text of the user's first message."""
        present = {part["place"].kind for message in messages for part in _media_parts(message)}
        lost = [kind for kind, found in items.items() if found and kind not in present]
        first = next((message for message in messages if message["role"] == "user"), None)
        if lost and first is not None:
            content = first["content"]
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            first["content"] = [media_part(kind) for kind in lost for _ in items[kind]] + texts

    def _check_counts(self, items: Mapping[str, Sequence[Any]], places: Sequence[_Place]) -> None:
        for kind, found in items.items():
            wanted = sum(place.kind == kind and place.raw is None for place in places)
            if wanted != len(found):
                column = self._config.columns[kind]
                raise Mismatch(
                    f"its messages have {wanted} places for {kind} (<{kind}> in texts, or parts), and {column!r} has "
                    f"{len(found)}; where a text speaks of the word itself, write the message's content as parts"
                )
        if len(places) > self._config.max_items:
            raise Mismatch(f"it has {len(places)} media, and {self._config.max_items} are allowed (media.max_items)")


def media_part(kind: str, raw: Any = None) -> Part:
    """The content part of one item; `raw`: what the row's own part says of it, if anything."""
    return {"type": kind, "place": _Place(kind, raw)}


def read_part(part: Mapping[str, Any]) -> Part | None:
    """A text or media part of a row's message; None when it is neither."""
    kind = part.get("type")
    if kind in ("text", "input_text"):
        return {"type": "text", "text": str(part.get("text") or "")}
    if not isinstance(kind, str) or kind not in PART_KINDS:
        return None
    names = (kind, PART_KINDS[kind], "url", "path", "base64", "bytes")
    name = next((name for name in names if part.get(name) is not None), None)
    raw = None if name is None else {"base64": part[name]} if name == "base64" else part[name]
    if isinstance(raw, Mapping) and "data" in raw:  # input_audio
        raw = {"base64": raw["data"]}
    return media_part(PART_KINDS[kind], raw)


def _media_parts(message: Mapping[str, Any]) -> Iterator[Part]:
    if not isinstance(message["content"], str):
        yield from (part for part in message["content"] if part["type"] != "text")


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Parts as templates take them; a content of text alone as one text."""
    content = message["content"]
    if isinstance(content, str):
        return message
    if not any(part["type"] != "text" for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    return {**message, "content": [{"type": p["type"]} if p["type"] != "text" else dict(p) for p in content]}
