"""Judges: what answers the requests of the genrm role. Models on engines of this run, and servers of somebody else's."""

import asyncio
import itertools
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from relax.config.data import DataSection
from relax.config.genrm import JudgeConfig, LocalJudgeConfig, OpenAIJudgeConfig
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.engines.engine import EngineStats, RequestError
from relax.engines.pool import EnginePool
from relax.errors import ConfigError, DataError, EngineError, ModelError, ServerError
from relax.models.folder import read_model_folder
from relax.rewards.http import open_session, post
from relax.types import FinishReason, GenerateRequest, Prompt, Sampling

WRONG, REFUSED, DOWN, LATE = 400, 502, 503, 504
_STATS_S = 5.0


class JudgeError(Exception):
    """No reply; `status` is that of HTTP: the request is wrong, the judge refused it, is down, or took too long."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that a judge is to continue."""

    messages: Sequence[Mapping[str, str]]
    temperature: float
    max_new_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def has_one_reply(self) -> bool:
        """Whether asking again would give the same."""
        return self.temperature == 0 or self.seed is not None


@dataclass(frozen=True, slots=True)
class Verbatim:
    """What a judge said; `finish_reason` is "stop" or "length"."""

    response: str
    finish_reason: str
    completion_tokens: int


class Judge(Protocol):
    """Answers one question at a time, of which any number may be under way."""

    async def start(self) -> None:
        """Raises a `ConfigError` or `ModelError` when it cannot be used."""

    async def reply(self, question: Question) -> Verbatim:
        """Raises `JudgeError`."""
        ...

    async def engines(self) -> list[dict[str, Any]]:
        """What it computes with, as JSON values."""
        ...


def make_judge(route: str, config: JudgeConfig, engines: EnginePool | None) -> Judge:
    """The judge that `genrm.judges.{route}` describes; `engines`: those of a local one."""
    if isinstance(config, OpenAIJudgeConfig):
        return ServedJudge(route, config)
    assert engines is not None, f"judge {route} has no engines"
    return LocalJudge(route, config, engines)


class LocalJudge:
    """A model on engines of this run, with its own tokenizer and chat template."""

    def __init__(self, route: str, config: LocalJudgeConfig, engines: EnginePool) -> None:
        self._config, self._engines = config, engines
        self._key = f"genrm.judges.{route}"
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._renderer: Renderer | None = None
        self._context = 0

    async def start(self) -> None:
        model = self._config.model
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            self._context = model.max_context or read_model_folder(model).context
        except ModelError as error:
            named = str(error) if str(error).startswith("model.") else f"model.path: {error}"
            raise ModelError(f"{self._key}.{named}") from error
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"{self._key}.model.path = {model.path!r}: its tokenizer has no chat template, which a judge needs"
            )
        self._renderer = Renderer(tokenizer, DataSection(template_options=self._config.template_options))

    async def reply(self, question: Question) -> Verbatim:
        assert self._renderer is not None, "not started"
        ids = self._prompt_ids(self._renderer, question)
        sampling = Sampling(question.max_new_tokens, question.temperature, stop=question.stop)
        seed = question.seed if question.seed is not None else secrets.randbits(62)
        try:
            async with asyncio.timeout(self._config.request_time_limit_s):
                [completion] = await self._engines.generate(GenerateRequest(next(self._names), ids, (seed,), sampling))
        except TimeoutError as error:
            raise JudgeError(LATE if await self._is_up() else DOWN, late(self._key, self._config)) from error
        except RequestError as error:
            raise JudgeError(WRONG, f"{self._key}: {error}") from error
        except EngineError as error:
            raise JudgeError(DOWN, f"{self._key}: {error}") from error
        if completion.finish is FinishReason.ABORT:
            raise JudgeError(DOWN, f"{self._key}: the request was aborted")
        reason = "length" if completion.finish is FinishReason.LENGTH else "stop"
        return Verbatim(self._renderer.text(completion.token_ids.tolist()), reason, len(completion.token_ids))

    def _prompt_ids(self, renderer: Renderer, question: Question) -> list[int]:
        try:
            ids = renderer.prompt_ids(Prompt("the messages", messages=tuple(question.messages)))
        except DataError as error:
            raise JudgeError(WRONG, f"{self._key}: {error}") from error
        if self._context and len(ids) + question.max_new_tokens > self._context:
            raise JudgeError(
                WRONG,
                f"{self._key}: the messages have {len(ids)} tokens, which leaves no room for max_new_tokens = "
                f"{question.max_new_tokens} in a context of {self._context}; nothing is cut off: ask with less",
            )
        return ids

    async def _is_up(self) -> bool:
        return any(stats.version >= 0 for stats in (await self._stats()).values())

    async def _stats(self) -> dict[str, EngineStats]:
        try:
            async with asyncio.timeout(_STATS_S):
                return await self._engines.stats()
        except TimeoutError:
            return {}

    async def engines(self) -> list[dict[str, Any]]:
        stats = await self._stats()
        return [
            {
                "engine": name,
                "is_ready": name in stats and stats[name].version >= 0,
                "running": stats[name].num_running if name in stats else 0,
                "waiting": stats[name].num_waiting if name in stats else 0,
                "generated_tokens": stats[name].generated_tokens if name in stats else 0,
            }
            for name in self._engines.names
        ]


class ServedJudge:
    """A model behind a server that speaks OpenAI's chat protocol."""

    def __init__(self, route: str, config: OpenAIJudgeConfig) -> None:
        self._config, self._key = config, f"genrm.judges.{route}"
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._last_error: str | None = None

    async def start(self) -> None:
        check_key(self._key, self._config)

    async def reply(self, question: Question) -> Verbatim:
        config = self._config
        content: dict[str, Any] = {
            "model": config.model,
            "messages": [dict(message) for message in question.messages],
            "temperature": question.temperature,
            "max_tokens": question.max_new_tokens,
            "n": 1,
        }
        content |= {"seed": question.seed} if question.seed is not None else {}
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


def check_key(key: str, config: OpenAIJudgeConfig) -> None:
    """Raises `ConfigError` when the key's environment variable is not set."""
    if config.api_key_env is not None and not os.environ.get(config.api_key_env):
        raise ConfigError(f"{key}.api_key_env = {config.api_key_env!r}: this environment variable is not set")


def late(key: str, config: JudgeConfig) -> str:
    """What is said of a judge that took too long."""
    return f"no answer in {key}.request_time_limit_s = {config.request_time_limit_s:g}"


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
