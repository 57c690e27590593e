"""Several engines behind one face: a request goes to the least loaded one, and on to another when that one fails.

generate --> least loaded engine that has not failed this request --EngineError--> another, or one put in its place
                                                                 '--all failed: pause, then all again, `max_attempts` in all
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from relax.engines.engine import Engine, EngineStats, RequestError
from relax.errors import EngineError
from relax.types import Completion, FinishReason, GenerateRequest

log = logging.getLogger("relax.engines")

_LONGEST_PAUSE_S = 5.0


class EnginePool:
    """Routes requests over engines, which may come and go. One event loop uses it.

    An engine that is added or put in another's place must hold weights already. A request that is tried again starts over: its
    seeds give it the same draws. It is tried `max_attempts` times; when every engine has failed it, after a pause of
    `first_pause_s`, which doubles up to 5 s and ends early when an engine is added or replaced.
    """

    def __init__(self, engines: Mapping[str, Engine], *, max_attempts: int = 8, first_pause_s: float = 0.1) -> None:
        self._engines = dict(engines)
        self._max_attempts, self._first_pause_s = max_attempts, first_pause_s
        self._load: Counter[Engine] = Counter()  # completions outstanding
        self._routes: dict[str, Engine | None] = {}
        self._aborted: set[str] = set()
        self._changed = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._engines)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion for each seed, in their order.

        Raises the last `EngineError` when all attempts have failed, and a `RequestError` at once.
        """
        name = request.request_id
        if name in self._routes:
            raise RequestError(f"request {name!r} is being served already: give each request an id of its own")
        self._routes[name] = None
        try:
            return await self._generate(request)
        finally:
            del self._routes[name]
            self._aborted.discard(name)

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        failed: set[Engine] = set()
        tries, pause_s, last = 0, self._first_pause_s, EngineError("there is no engine")
        for _ in range(self._max_attempts + 1):
            if request.request_id in self._aborted:
                return [_nothing() for _ in request.seeds]
            if tries == self._max_attempts:
                break
            tries += 1
            engine = self._least_loaded(failed)
            if engine is None:
                await self._pause(pause_s)
                pause_s, failed = min(2 * pause_s, _LONGEST_PAUSE_S), set()
                engine = self._least_loaded(failed)
            if engine is None or request.request_id in self._aborted:
                continue
            try:
                return await self._generate_on(engine, request)
            except RequestError:
                raise
            except EngineError as error:
                failed.add(engine)
                last = error
                log.warning("request %s is tried again: %s", request.request_id, error)
        raise EngineError(f"request {request.request_id!r} failed {self._max_attempts} times, at last: {last}") from last

    async def _generate_on(self, engine: Engine, request: GenerateRequest) -> list[Completion]:
        self._load[engine] += len(request.seeds)
        self._routes[request.request_id] = engine
        try:
            return await engine.generate(request)
        finally:
            self._load[engine] -= len(request.seeds)
            self._routes[request.request_id] = None
            if not self._load[engine]:
                del self._load[engine]

    def _least_loaded(self, failed: set[Engine]) -> Engine | None:
        able = [engine for engine in self._engines.values() if engine not in failed]
        return min(able, key=lambda engine: self._load[engine], default=None)

    async def _pause(self, seconds: float) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            log.debug("no engine was added or replaced within %.1f s", seconds)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests wherever they are: their `generate` returns what there is. Ids of ended ones are let alone."""
        there: dict[Engine, list[str]] = {}
        for name in request_ids:
            if name in self._routes:
                self._aborted.add(name)
                if (engine := self._routes[name]) is not None:
                    there.setdefault(engine, []).append(name)
        self._changed.set()
        await asyncio.gather(*(engine.abort(names) for engine, names in there.items()))

    def add(self, name: str, engine: Engine) -> None:
        """Routes to one engine more. Raises `EngineError` when there is one of that name."""
        if name in self._engines:
            raise EngineError(f"there is an engine {name!r} already; `replace` puts another in its place")
        self._engines[name] = engine
        self._changed.set()

    def replace(self, name: str, engine: Engine) -> Engine | None:
        """Puts `engine` in the place of the one called `name`, if there is one, and returns that, which stays open."""
        before = self._engines.get(name)
        self._engines[name] = engine
        self._changed.set()
        return before

    def remove(self, name: str) -> Engine:
        """Routes nothing more to the engine, and returns it: open, and perhaps with requests still in hand."""
        if name not in self._engines:
            raise EngineError(f"there is no engine {name!r}; there are: {', '.join(self._engines) or 'none'}")
        return self._engines.pop(name)

    def outstanding(self, name: str) -> int:
        """Completions that the engine called `name` has in hand for this pool."""
        return self._load[self._engines[name]]

    async def stats(self) -> dict[str, EngineStats]:
        """Each engine's own, by name; an engine that does not answer is left out."""
        names = list(self._engines)
        found = await asyncio.gather(*(self._stats_of(self._engines[name]) for name in names))
        return {name: stats for name, stats in zip(names, found, strict=True) if stats is not None}

    @staticmethod
    async def _stats_of(engine: Engine) -> EngineStats | None:
        try:
            return await engine.stats()
        except EngineError as error:
            log.debug("an engine gives no statistics: %s", error)
            return None

    async def close(self) -> None:
        """Closes every engine."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))


def _nothing() -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.ABORT)
