"""An engine for tests of the pool: it does what it is told to, and tells what it was asked."""

import asyncio

import numpy as np

from relax.engines.engine import EngineAsleep, EngineStats
from relax.errors import EngineError
from relax.types import Completion, FinishReason, VersionSegment


def completion(tokens=(), finish=FinishReason.STOP):
    segments = (VersionSegment(0, 3),) if tokens else ()
    return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), segments, finish)


def plain(engine_id):
    """The pool's request behind an engine's."""
    return engine_id.split("@")[0]


class Engine:
    """Holds every request until it is let go, fails it, or is dead. `tokens`: how far its requests have come."""

    def __init__(self, *, is_dead: bool = False, version: int = 3) -> None:
        self.is_dead, self.is_closed, self.is_asleep, self.version = is_dead, False, False, version
        self.is_serving = asyncio.Event()
        self.served: list[str] = []
        self.calls = []
        self.aborted: list[str] = []
        self.held: dict[str, asyncio.Future[FinishReason]] = {}
        self.tokens: tuple[int, ...] = ()
        self.num_asked = self.num_looked_at = 0

    async def generate(self, call):
        if self.is_dead:
            raise EngineError("dead")
        if self.is_asleep:
            raise EngineAsleep("asleep")
        if self.version < 0:
            raise EngineError("no weights loaded")
        name = plain(call.request_id)
        self.served.append(name)
        self.calls.append(call)
        self.is_serving.set()
        self.held[name] = asyncio.get_running_loop().create_future()
        finish = await self.held[name]
        return [completion(self.tokens, finish) for _ in call.seeds]

    def let_go(self, *names: str) -> None:
        for name in names or list(self.held):
            self.held.pop(name).set_result(FinishReason.STOP)

    def fail(self, error: EngineError) -> None:
        for future in self.held.values():
            future.set_exception(error)
        self.held.clear()

    def die(self) -> None:
        self.is_dead = True
        self.fail(EngineError("died"))

    async def abort(self, names):
        if self.is_dead:
            raise EngineError("dead")
        for name in names:
            self.aborted.append(name)
            if plain(name) in self.held:
                self.held.pop(plain(name)).set_result(FinishReason.ABORT)

    async def load_weights(self, manifest):
        return 0.0

    async def progress(self, names):
        if self.is_dead:
            raise EngineError("dead")
        self.num_asked += 1
        there = {call.request_id: len(call.seeds) for call in self.calls}
        return {n: [completion(self.tokens, FinishReason.ABORT)] * there[n] for n in names if plain(n) in self.held}

    async def stats(self):
        self.num_looked_at += 1
        if self.is_dead:
            raise EngineError("dead")
        return EngineStats(-1 if self.is_asleep else self.version, len(self.held), 0, 0, 0, 0.0)

    async def close(self):
        self.is_closed = True


async def started(*calls):
    """The calls as tasks that have reached an engine."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


async def serving(engine):
    await asyncio.wait_for(engine.is_serving.wait(), 10)
    engine.is_serving.clear()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.001)
