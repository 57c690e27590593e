"""The genrm role: judges that say how good responses are.

POST /genrm/generate -> the judge at `route` -> said before? -> a place among its requests -> engines, or a server -> the reply
  waits for: requests of reward workers, a judge       answers: 200, 400 wrong, 502 refused, 503 down, 504 too late
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax.bus.transfer_queue import TransferQueue
from relax.config.genrm import JudgeConfig, OpenAIJudgeConfig
from relax.config.mistakes import nearest
from relax.config.run import RunConfig
from relax.engines.pool import EnginePool
from relax.errors import DataError, WaitTimeout
from relax.models.processor import KINDS
from relax.roles.judges import DOWN, WRONG, Judge, JudgeError, LocalJudge, Question, Verbatim
from relax.roles.reply_cache import ReplyCache
from relax.roles.role import Reply, Role
from relax.roles.served_judge import ServedJudge
from relax.roles.shown_media import ShownMedia
from relax.roles.topology import judge_pool, judges_in_use
from relax.types import Media

_REPORT_S = 0.2
_LEAST_TEMPERATURE = 1e-6  # logits over much less are infinite
TOTALS = tuple(f"genrm/{name}" for name in ("requests", "cached", "failed", "asked_again", "tokens", "answer_s"))
_PAGES = "POST /genrm/generate, GET /genrm/engines, GET /genrm/health, GET /genrm/status"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """`content`: a text, or parts as rows of data have them."""

    role: str
    content: str | list[dict[str, Any]]


class _Sampling(msgspec.Struct, forbid_unknown_fields=True):
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    seeds: list[int] | None = None
    stop: list[str] = []


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """`attempt`: how often the judge's reply to this was of no use before."""

    messages: list[_Message]
    sampling_params: _Sampling = msgspec.field(default_factory=_Sampling)
    route: str = "default"
    attempt: int = 0


class GenRM(Role):
    """Answers requests until it is stopped; `pools` holds the engines of local judges."""

    def __init__(self, config: RunConfig, bus: TransferQueue, pools: Mapping[str, EnginePool]) -> None:
        super().__init__("genrm", config, bus)
        assert config.genrm is not None, "no judges"
        self._configs: Mapping[str, JudgeConfig] = judges_in_use(config)
        self._shown = ShownMedia.of(config)
        self._judges: dict[str, Judge] = {
            route: make_judge(route, judge, pools.get(judge_pool(route)), self._shown) for route, judge in self._configs.items()
        }
        self._cache = ReplyCache[list[Verbatim]](config.genrm.cache_entries)
        self._num_under_way = 0
        self._is_ready = False
        self.totals: dict[str, float] = dict.fromkeys(TOTALS, 0)
        self._last_error: str | None = None

    async def start(self) -> None:
        for route, judge in self._judges.items():
            await judge.start()
            if self._shown is not None and not judge.kinds:
                text = f"judge {route!r} is shown the text of prompts without their media: see genrm.judges.{route}.media"
                await self.bus.emit({"kind": "warning", "role": self.name, "text": text})
        self._is_ready = True

    async def stop(self) -> None:
        for judge in self._judges.values():
            await judge.stop()

    async def run(self) -> None:
        reported: dict[str, float] = {}
        while True:
            self.activity = f"{self._num_under_way} requests under way" if self._num_under_way else "waiting for requests"
            if (totals := self.totals.copy()) != reported:
                with contextlib.suppress(WaitTimeout):  # the next report holds these as well
                    await self.bus.emit({"kind": "totals", "role": self.name, "totals": totals})
                    reported = totals
            await asyncio.sleep(_REPORT_S)

    # -- requests -----------------------------------------------------------------------------------------------------
    async def answer(self, method: str, page: str, body: bytes) -> Reply:
        match method, page:
            case "POST", "generate":
                return await self._generate(body)
            case "GET", "engines":
                return 200, {"judges": {route: await judge.engines() for route, judge in self._judges.items()}}
            case "GET", "health":
                return await self._health()
        return 404, {"error": f"no such page; there are {_PAGES}"}

    async def _health(self) -> Reply:
        up = {route: any(engine["is_ready"] for engine in await judge.engines()) for route, judge in self._judges.items()}
        return (200 if all(up.values()) else 503), {"judges": up}

    async def _generate(self, body: bytes) -> Reply:
        self.totals["genrm/requests"] += 1
        self._num_under_way += 1
        began = asyncio.get_running_loop().time()
        try:
            return 200, await self._reply(body)
        except JudgeError as error:
            self.totals["genrm/failed"] += 1
            self._last_error = str(error)
            return error.status, {"error": str(error)}
        finally:
            self._num_under_way -= 1
            self.totals["genrm/answer_s"] += asyncio.get_running_loop().time() - began

    async def _reply(self, body: bytes) -> dict[str, Any]:
        if not self._is_ready:
            raise JudgeError(DOWN, "genrm is being started")
        asked = _read(body)
        self.totals["genrm/asked_again"] += asked.attempt > 0
        question = self._question(asked)

        async def ask() -> list[Verbatim]:
            replies = await self._judges[asked.route].replies(question)
            self.totals["genrm/tokens"] += sum(reply.completion_tokens for reply in replies)
            self.progress += 1
            return replies

        if question.is_repeatable and self.config.genrm is not None and self.config.genrm.cache_entries:
            replies, is_cached = await self._cache.get(_key(asked.route, question), ask)
        else:
            replies, is_cached = await ask(), False
        self.totals["genrm/cached"] += is_cached
        said = [
            {"response": r.response, "finish_reason": r.finish_reason, "completion_tokens": r.completion_tokens}
            for r in replies
        ]
        seeds = asked.sampling_params.seeds
        several = {} if seeds is None else {"replies": said if question.seeds else said * len(seeds)}
        return {**(several or said[0]), "route": asked.route, "cached": is_cached}

    def _question(self, asked: _Body) -> Question:
        judge = self._configs.get(asked.route)
        if judge is None:
            near = nearest(asked.route, self._configs)
            hint = f"; did you mean {near!r}?" if near else ""
            raise JudgeError(WRONG, f"route = {asked.route!r}: there are the judges {', '.join(self._configs)}{hint}")
        named = asked.sampling_params
        temperature = judge.temperature if named.temperature is None else named.temperature
        longest = judge.max_new_tokens if named.max_new_tokens is None else named.max_new_tokens
        seeds = named.seeds if named.seeds is not None else [named.seed] if named.seed is not None else []
        messages, media = self._messages(asked.route, asked.messages)
        return Question(messages, temperature, longest, tuple(seeds) if temperature > 0 else (), tuple(named.stop), media)

    def _messages(self, route: str, asked: Sequence[_Message]) -> tuple[Sequence[Mapping[str, Any]], tuple[Media, ...]]:
        """The messages, and of the media in them what the judge is shown. Without `media = true` others are left out."""
        messages = [{"role": message.role, "content": message.content} for message in asked]
        if all(isinstance(message.content, str) for message in asked):
            return messages, ()
        key = f"genrm.judges.{route}.media"
        if self._shown is None:
            raise JudgeError(WRONG, "messages: this run reads no media: content must be a text, or data.media be set")
        kinds = self._judges[route].kinds
        try:
            messages, media = self._shown.read(messages, KINDS if self._configs[route].media else kinds)
        except DataError as error:
            raise JudgeError(WRONG, str(error)) from error
        if strange := sorted({item.kind for item in media} - {*kinds}):
            raise JudgeError(WRONG, f"{key} = true, and the judge's model reads no {strange[0]}: leave the setting out")
        return messages, media

    def status(self) -> dict[str, Any]:
        counts = {name: round(total, 3) for name, total in self.totals.items()}
        return super().status() | {"counts": counts, "kept_replies": len(self._cache), "last_error": self._last_error}


def _read(body: bytes) -> _Body:
    """The request. Raises `JudgeError` that says what is wrong with it."""
    try:
        asked = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        wanted = (
            '{"messages": [{"role": "user", "content": "..."}], "route": "default", "sampling_params": {"temperature": 0, '
            '"max_new_tokens": 100, "seed": 1, "stop": []}}'
        )
        raise JudgeError(WRONG, f"{error}; wanted is JSON like {wanted}, of which only messages are needed") from error
    named = asked.sampling_params
    for what, is_right, wanted in (
        ("messages", bool(asked.messages), "at least one"),
        (
            "sampling_params.temperature",
            named.temperature is None or named.temperature == 0 or _LEAST_TEMPERATURE <= named.temperature < 100,
            f"0, or from {_LEAST_TEMPERATURE:g} to 100",
        ),
        ("sampling_params.max_new_tokens", named.max_new_tokens is None or named.max_new_tokens >= 1, "at least 1"),
        ("sampling_params.seed", named.seed is None or _is_seed(named.seed), "from 0 to 2^63 - 1"),
        (
            "sampling_params.seeds",
            named.seeds is None or (named.seed is None and bool(named.seeds) and all(map(_is_seed, named.seeds))),
            "numbers from 0 to 2^63 - 1, and no seed beside them",
        ),
        ("sampling_params.stop", all(named.stop), "texts that are not empty"),
    ):
        if not is_right:
            raise JudgeError(WRONG, f"{what}: wanted is {wanted}")
    return asked


def _is_seed(number: int) -> bool:
    return 0 <= number < 1 << 63


def make_judge(route: str, config: JudgeConfig, engines: EnginePool | None, shown: ShownMedia | None) -> Judge:
    """The judge that `genrm.judges.{route}` describes; `engines`: those of a local one; `shown`: where rows have media."""
    if isinstance(config, OpenAIJudgeConfig):
        return ServedJudge(route, config, shown)
    assert engines is not None, f"judge {route} has no engines"
    return LocalJudge(route, config, engines, shown)


def _key(route: str, question: Question) -> bytes:
    """What the reply depends on."""
    media = [(item.kind, item.source) for item in question.media]  # of bytes the source is a place that only these have
    content = [route, *question.messages, media, question.temperature, question.max_new_tokens, question.seeds, question.stop]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8", "replace")).digest()
