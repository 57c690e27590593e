"""Media of prompts in reward workers: where they are, so that roles which a reward asks can be shown them.

rollout: parts with their source --> worker: a file is named, bytes that came inside a row are read --> request to a role
"""

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax.errors import RewardError
from relax.types import Prompt

_spools: list[int] = []  # of a worker: at most one


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """The prompt's messages; a part that stands for a medium says where that is, as its `source`."""
    sources = iter([item.source for item in prompt.media])
    return [{**message, "content": _placed(message.get("content"), sources)} for message in prompt.messages]


def _placed(content: Any, sources: Iterator[str]) -> Any:
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    return [part if part.get("type") == "text" else {**part, "source": next(sources)} for part in content]


def is_medium(part: Any) -> bool:
    """Whether this part of a message stands for a medium."""
    return isinstance(part, Mapping) and "source" in part


def media_in(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The parts of the messages that stand for media, in their order."""
    contents = [message.get("content") for message in messages]
    return [part for content in contents if not isinstance(content, str) for part in content or () if is_medium(part)]


def without_sources(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the rows have them, wherever their media lie."""
    return [{**message, "content": _each(message.get("content"), lambda part: {"type": part["type"]})} for message in messages]


def as_request(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as roles take them (`roles/shown_media.py`): files by their path, other bytes along with the request."""
    return [{**message, "content": _each(message.get("content"), _sent)} for message in messages]


def _each(content: Any, change: Any) -> Any:
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    return [change(part) if is_medium(part) else part for part in content]


def _sent(part: Mapping[str, Any]) -> dict[str, Any]:
    source = str(part["source"])
    if not source.startswith("spool:"):
        return {"type": part["type"], "path": source}
    offset, size = map(int, source.split(":")[1:])
    if not _spools:
        raise RewardError(f"{source}: this process has no media of rows to read. Reward workers of a run have them")
    return {"type": part["type"], "base64": base64.b64encode(os.pread(_spools[0], size, offset)).decode()}


def use_spool(fd: int) -> None:
    """Called in a worker: where the bytes are that came inside rows."""
    _spools[:] = [fd]
