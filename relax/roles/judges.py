"""Judges: what answers the requests of the genrm role. Here: what all of them are, and models on engines of this run."""

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax.config.data import DataSection
from relax.config.genrm import JudgeConfig, LocalJudgeConfig
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.engines.engine import EngineStats, RequestError
from relax.engines.pool import EnginePool
from relax.errors import DataError, EngineError, ModelError
from relax.models.folder import read_model_folder
from relax.models.preparer import ReadyPrompt
from relax.roles.shown_media import PreparedMedia, ShownMedia
from relax.types import Completion, FinishReason, GenerateRequest, Media, Prompt, Sampling

WRONG, REFUSED, DOWN, LATE = 400, 502, 503, 504
_STATS_S = 5.0


class JudgeError(Exception):
    """No reply; `status` is that of HTTP: the request is wrong, the judge refused it, is down, or took too long."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that a judge is to continue: once for each of `seeds`, or once with a seed that nobody knows.

    `media` are in the order of the parts in `messages` that stand for them.
    """

    messages: Sequence[Mapping[str, Any]]
    temperature: float
    max_new_tokens: int
    seeds: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    media: tuple[Media, ...] = ()

    @property
    def is_repeatable(self) -> bool:
        """Whether asking again would give the same."""
        return self.temperature == 0 or bool(self.seeds)


@dataclass(frozen=True, slots=True)
class Verbatim:
    """What a judge said; `finish_reason` is "stop" or "length"."""

    response: str
    finish_reason: str
    completion_tokens: int


class Judge(Protocol):
    """Answers questions, of which any number may be under way. `kinds`: the media that it is shown, once it is started."""

    kinds: tuple[str, ...]

    async def start(self) -> None:
        """Raises a `ConfigError` or `ModelError` when it cannot be used."""

    async def stop(self) -> None:
        """Frees what `start` took."""

    async def replies(self, question: Question) -> list[Verbatim]:
        """One for each seed. Raises `JudgeError`."""
        ...

    async def engines(self) -> list[dict[str, Any]]:
        """What it computes with, as JSON values."""
        ...


class LocalJudge:
    """A model on engines of this run, with its own tokenizer, chat template and processor. `shown`: where rows have media."""

    def __init__(self, route: str, config: LocalJudgeConfig, engines: EnginePool, shown: ShownMedia | None) -> None:
        self._config, self._engines, self._shown = config, engines, shown
        self.kinds: tuple[str, ...] = ()
        self._media: PreparedMedia | None = None
        self._places = asyncio.Semaphore(config.max_requests)
        self._key = f"genrm.judges.{route}"
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._renderer: Renderer | None = None
        self._context, self._has_ended = 0, False

    async def start(self) -> None:
        model = self._config.model
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
            folder = read_model_folder(model)
        except ModelError as error:
            named = str(error) if str(error).startswith("model.") else f"model.path: {error}"
            raise ModelError(f"{self._key}.{named}") from error
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"{self._key}.model.path = {model.path!r}: its tokenizer has no chat template, which a judge needs"
            )
        self._context = model.max_context or folder.context
        self._renderer = Renderer(tokenizer, DataSection(template_options=self._config.template_options))
        if self._shown is not None:
            if fault := self._config.fault_of_media(folder.media):
                raise ModelError(f"{self._key}.{fault}")
            self.kinds = self._config.kinds_of(folder.media)
        if self._shown is not None and self.kinds:
            self._media = PreparedMedia(model, self._shown)
            await self._media.start()

    async def stop(self) -> None:
        self._has_ended = True  # media workers refuse what is asked of them from now on, which is nobody's mistake
        if self._media is not None:
            await self._media.close()

    async def replies(self, question: Question) -> list[Verbatim]:
        async with self._places:
            return await self._replies(question)

    async def _replies(self, question: Question) -> list[Verbatim]:
        assert self._renderer is not None, "not started"
        sampling = Sampling(question.max_new_tokens, question.temperature, stop=question.stop)
        seeds = question.seeds or (secrets.randbits(62),)
        try:
            async with asyncio.timeout(self._config.request_time_limit_s):
                ready = await self._read(self._renderer, question)
                request = GenerateRequest(next(self._names), ready.ids, seeds, sampling, features=ready.features)
                completions = await self._engines.generate(request)
        except TimeoutError as error:
            raise JudgeError(LATE if await self._is_up() else DOWN, late(self._key, self._config)) from error
        except RequestError as error:
            raise JudgeError(WRONG, f"{self._key}: {error}") from error
        except EngineError as error:
            raise JudgeError(DOWN, f"{self._key}: {error}") from error
        return [self._verbatim(self._renderer, completion) for completion in completions]

    def _verbatim(self, renderer: Renderer, completion: Completion) -> Verbatim:
        if completion.finish is FinishReason.ABORT:
            raise JudgeError(DOWN, f"{self._key}: the request was aborted")
        reason = "length" if completion.finish is FinishReason.LENGTH else "stop"
        return Verbatim(renderer.text(completion.token_ids.tolist()), reason, len(completion.token_ids))

    async def _read(self, renderer: Renderer, question: Question) -> ReadyPrompt:
        """The ids of the messages, those of media in their places. What messages say is text to the renderer, whatever it
        says: places are those of parts."""
        try:
            ids = renderer.prompt_ids(Prompt("the messages", messages=tuple(question.messages)))
            ready = ReadyPrompt(ids)
            if question.media:
                assert self._media is not None, "kinds that it is not shown are left out"
                of_media = await self._media.of(question.media)
                ready = ReadyPrompt(of_media.expand(ids, [0] * len(ids))[0], of_media.features)
        except DataError as error:
            raise JudgeError(DOWN if self._has_ended else WRONG, f"{self._key}: {error}") from error
        if self._context and len(ready.ids) + question.max_new_tokens > self._context:
            raise JudgeError(
                WRONG,
                f"{self._key}: the messages have {len(ready.ids)} tokens, which leaves no room for max_new_tokens = "
                f"{question.max_new_tokens} in a context of {self._context}; nothing is cut off: ask with less",
            )
        return ready

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


def late(key: str, config: JudgeConfig) -> str:
    """What is said of a judge that took too long."""
    return f"no answer in {key}.request_time_limit_s = {config.request_time_limit_s:g}"
