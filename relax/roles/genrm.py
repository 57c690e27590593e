"""The genrm role: judges that say how good responses are.

POST /genrm/generate -> the judge at `route` -> said before? -> a place among its requests -> engines, or a server -> the reply
  waits for: requests of reward workers, a judge       answers: 200, 400 wrong, 502 refused, 503 down, 504 too late
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from relax.bus.transfer_queue import TransferQueue
from relax.config.genrm import JudgeConfig
from relax.config.mistakes import nearest
from relax.config.run import RunConfig
from relax.engines.pool import EnginePool
from relax.errors import WaitTimeout
from relax.roles.judges import DOWN, WRONG, Judge, JudgeError, Question, Verbatim, make_judge
from relax.roles.reply_cache import ReplyCache
from relax.roles.role import Reply, Role
from relax.roles.topology import judge_pool, judges_in_use

_REPORT_S = 0.2
TOTALS = tuple(f"genrm/{name}" for name in ("requests", "cached", "failed", "asked_again", "tokens", "answer_s"))
_PAGES = "POST /genrm/generate, GET /genrm/engines, GET /genrm/health, GET /genrm/status"


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Sampling(msgspec.Struct, forbid_unknown_fields=True):
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
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
        self._judges: dict[str, Judge] = {
            route: make_judge(route, judge, pools.get(judge_pool(route))) for route, judge in self._configs.items()
        }
        self._places = {route: asyncio.Semaphore(judge.max_requests) for route, judge in self._configs.items()}
        self._cache = ReplyCache[Verbatim](config.genrm.cache_entries)
        self._num_under_way = 0
        self._is_ready = False
        self.totals: dict[str, float] = dict.fromkeys(TOTALS, 0)
        self._last_error: str | None = None

    async def start(self) -> None:
        for judge in self._judges.values():
            await judge.start()
        self._is_ready = True

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

        async def ask() -> Verbatim:
            async with self._places[asked.route]:
                reply = await self._judges[asked.route].reply(question)
            self.totals["genrm/tokens"] += reply.completion_tokens
            self.progress += 1
            return reply

        if question.has_one_reply and self.config.genrm is not None and self.config.genrm.cache_entries:
            reply, is_cached = await self._cache.get(_key(asked.route, question), ask)
        else:
            reply, is_cached = await ask(), False
        self.totals["genrm/cached"] += is_cached
        return {
            "response": reply.response,
            "route": asked.route,
            "finish_reason": reply.finish_reason,
            "completion_tokens": reply.completion_tokens,
            "cached": is_cached,
        }

    def _question(self, asked: _Body) -> Question:
        judge = self._configs.get(asked.route)
        if judge is None:
            near = nearest(asked.route, self._configs)
            hint = f"; did you mean {near!r}?" if near else ""
            raise JudgeError(WRONG, f"route = {asked.route!r}: there are the judges {', '.join(self._configs)}{hint}")
        named = asked.sampling_params
        temperature = judge.temperature if named.temperature is None else named.temperature
        longest = judge.max_new_tokens if named.max_new_tokens is None else named.max_new_tokens
        return Question(
            tuple({"role": message.role, "content": message.content} for message in asked.messages),
            temperature,
            longest,
            named.seed if temperature > 0 else None,
            tuple(named.stop),
        )

    def status(self) -> dict[str, Any]:
        counts = {name: round(total, 3) for name, total in self.totals.items()}
        return super().status() | {"counts": counts, "kept_replies": len(self._cache), "last_error": self._last_error}


def _read(body: bytes) -> _Body:
    """The request. Raises `JudgeError` that says what is wrong with it."""
    try:
        asked = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        wanted = (
            '{"messages": [{"role": "user", "content": "..."}], "route": "default", "sampling_params": {"temperature": 0, '
            '"max_new_tokens": 100, "seed": 1, "stop": []}}'
        )
        raise JudgeError(WRONG, f"{error}; wanted is JSON like {wanted}, of which only messages are needed") from error
    named = asked.sampling_params
    for what, is_right, wanted in (
        ("messages", bool(asked.messages), "at least one"),
        ("sampling_params.temperature", named.temperature is None or 0 <= named.temperature < 100, "from 0 to 100"),
        ("sampling_params.max_new_tokens", named.max_new_tokens is None or named.max_new_tokens >= 1, "at least 1"),
        ("sampling_params.seed", named.seed is None or 0 <= named.seed < 1 << 63, "from 0 to 2^63 - 1"),
        ("sampling_params.stop", all(named.stop), "texts that are not empty"),
    ):
        if not is_right:
            raise JudgeError(WRONG, f"{what}: wanted is {wanted}")
    return asked


def _key(route: str, question: Question) -> bytes:
    """What the reply depends on."""
    content = [route, *question.messages, question.temperature, question.max_new_tokens, question.seed, question.stop]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8", "replace")).digest()
