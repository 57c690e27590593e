"""A judge behind a server that speaks OpenAI's chat protocol. Media are sent as parts of a message's content:

image  {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
audio  {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}
video  {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}      as vLLM takes it; OpenAI has none
"""

import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from relax.config.genrm import OpenAIJudgeConfig
from relax.data.media.decoded import Unreadable
from relax.data.media.source import open_source, shown
from relax.errors import ConfigError, ServerError
from relax.models.processor import KINDS
from relax.rewards.http import open_session, post
from relax.roles.judges import DOWN, LATE, REFUSED, WRONG, JudgeError, Question, Verbatim, late
from relax.roles.shown_media import ShownMedia
from relax.types import Media

# What a file is, by its bytes at an offset; the first that fits.
_TYPES = (
    *((0, b"\x89PNG", "image/png"), (0, b"\xff\xd8\xff", "image/jpeg"), (0, b"GIF8", "image/gif"), (8, b"WEBP", "image/webp")),
    *((0, b"BM", "image/bmp"), (0, b"II*\x00", "image/tiff"), (0, b"MM\x00*", "image/tiff"), (8, b"WAVE", "audio/wav")),
    *((0, b"fLaC", "audio/flac"), (0, b"OggS", "audio/ogg"), (0, b"ID3", "audio/mp3"), (0, b"\xff", "audio/mp3")),
    *((8, b"AVI ", "video/avi"), (4, b"ftyp", "video/mp4"), (0, b"\x1aE\xdf\xa3", "video/webm")),
)


class ServedJudge:
    """A model behind a server that speaks OpenAI's chat protocol. `shown`: where rows have media."""

    def __init__(self, route: str, config: OpenAIJudgeConfig, shown: ShownMedia | None) -> None:
        self._config, self._key, self._shown = config, f"genrm.judges.{route}", shown
        self.kinds: tuple[str, ...] = KINDS if config.media and shown is not None else ()
        self._places = asyncio.Semaphore(config.max_requests)
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._last_error: str | None = None

    async def start(self) -> None:
        check_key(self._key, self._config)

    async def stop(self) -> None:
        """There is nothing to free."""

    async def replies(self, question: Question) -> list[Verbatim]:
        messages: Sequence[Mapping[str, Any]] = question.messages
        if question.media:
            messages = await asyncio.to_thread(self._with_media, question)
        tasks = [asyncio.create_task(self._reply(question, messages, seed)) for seed in question.seeds or (None,)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # nothing when it is done

    def _with_media(self, question: Question) -> list[dict[str, Any]]:
        """The messages with what each place stands for. Reads files."""
        assert self._shown is not None, "rows have media"
        media, sent, left = iter(question.media), list[dict[str, Any]](), self._config.max_media_bytes
        for message in question.messages:
            content = message["content"]
            if not isinstance(content, str):
                content = [dict(part) for part in content]
                for place, part in enumerate(content):
                    if part["type"] != "text":
                        item = next(media)
                        body = self._bytes_of(item)
                        left -= len(body)
                        if left < 0:
                            limit = f"{self._key}.max_media_bytes = {self._config.max_media_bytes}"
                            raise JudgeError(WRONG, f"with {shown(item)} its media have more bytes than {limit}")
                        content[place] = chat_part(item.kind, body)
            sent.append({**message, "content": content})
        return sent

    def _bytes_of(self, item: Media) -> bytes:
        assert self._shown is not None, "rows have media"
        try:
            with open_source(item, self._shown.config, self._shown.spool.fd) as file:
                return file.read(self._config.max_media_bytes + 1)
        except (Unreadable, OSError) as why:
            raise JudgeError(WRONG, f"{self._key}: {shown(item)}: {why}") from why

    async def _reply(self, question: Question, messages: Sequence[Mapping[str, Any]], seed: int | None) -> Verbatim:
        async with self._places:
            return await self._ask(question, messages, seed)

    async def _ask(self, question: Question, messages: Sequence[Mapping[str, Any]], seed: int | None) -> Verbatim:
        config = self._config
        content: dict[str, Any] = {
            "model": config.model,
            "messages": [dict(message) for message in messages],
            "temperature": question.temperature,
            "max_tokens": question.max_new_tokens,
            "n": 1,
        }
        content |= {"seed": seed} if seed is not None else {}
        content |= {"stop": list(question.stop)} if question.stop else {}
        try:
            async with open_session(config.headers, config.api_key_env, config.request_time_limit_s) as session:
                body = await post(session, self._url, content, retries=config.retries, backoff_s=config.backoff_s)
            reply = read_chat_completion(body)
        except TimeoutError as error:
            raise self._failed(LATE, late(self._key, config)) from error
        except ServerError as error:
            raise self._failed(DOWN if error.may_pass else REFUSED, f"{self._url}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(DOWN, f"{self._url}: {type(error).__name__}: {error}") from error
        self._last_error = None
        return reply

    def _failed(self, status: int, text: str) -> JudgeError:
        self._last_error = text
        return JudgeError(status, text)

    async def engines(self) -> list[dict[str, Any]]:
        found = {"engine": self._config.url, "model": self._config.model, "is_ready": self._last_error is None}
        return [found | ({"error": self._last_error} if self._last_error else {})]


def chat_part(kind: str, body: bytes) -> dict[str, Any]:
    """One medium as a part of a message's content."""
    found = next((name for at, magic, name in _TYPES if body[at : at + len(magic)] == magic), f"{kind}/unknown")
    encoded = base64.b64encode(body).decode()
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": found.partition("/")[2]}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{found};base64,{encoded}"}}


def check_key(key: str, config: OpenAIJudgeConfig) -> None:
    """Raises `ConfigError` when the key's environment variable is not set."""
    if config.api_key_env is not None and not os.environ.get(config.api_key_env):
        raise ConfigError(f"{key}.api_key_env = {config.api_key_env!r}: this environment variable is not set")


def read_chat_completion(body: bytes) -> Verbatim:
    """The first choice of a chat completion. Raises `ServerError` for a body that is none."""
    try:
        document = json.loads(body)
        choice = document["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
        tokens = (document.get("usage") or {}).get("completion_tokens") or 0
        if not isinstance(text, str) or not isinstance(tokens, int):
            raise TypeError
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"it did not answer with a chat completion: {body[:100].decode('utf-8', 'replace')}") from error
    return Verbatim(text, "stop" if reason in ("stop", None) else str(reason), tokens)
