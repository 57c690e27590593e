"""A pool serves by the least loaded engine and survives those that fail."""

import asyncio

import numpy as np
import pytest
from engine_models import request

from relax.engines.engine import EngineStats, RequestError
from relax.engines.pool import EnginePool
from relax.errors import EngineError
from relax.types import Completion, FinishReason

PROMPT = [3, 4, 5]


class Engine:
    """Holds every request until it is let go, fails it, or is dead."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.is_dead, self.is_closed = is_dead, False
        self.is_serving = asyncio.Event()
        self.served: list[str] = []
        self.held: dict[str, asyncio.Future[FinishReason]] = {}

    async def generate(self, call):
        if self.is_dead:
            raise EngineError("dead")
        self.served.append(call.request_id)
        self.is_serving.set()
        self.held[call.request_id] = asyncio.get_running_loop().create_future()
        finish = await self.held[call.request_id]
        empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return [Completion(*empty, (), finish) for _ in call.seeds]

    def let_go(self, *names: str) -> None:
        for name in names or list(self.held):
            self.held.pop(name).set_result(FinishReason.STOP)

    def die(self) -> None:
        self.is_dead = True
        for future in self.held.values():
            future.set_exception(EngineError("died"))
        self.held.clear()

    async def abort(self, names):
        for name in names:
            self.held.pop(name).set_result(FinishReason.ABORT)

    async def load_weights(self, manifest):
        return 0.0

    async def stats(self):
        if self.is_dead:
            raise EngineError("dead")
        return EngineStats(3, len(self.held), 0, 0, 0, 0.0)

    async def close(self):
        self.is_closed = True


async def started(*calls):
    """The calls as tasks that have reached an engine."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_a_request_goes_to_the_engine_with_the_fewest_completions_in_hand():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a, "b": b})
    tasks = await started(*(pool.generate(request(str(i), PROMPT, num)) for i, num in enumerate([8, 2, 2, 2, 3, 8])))
    assert a.served == ["0", "5"]
    assert b.served == ["1", "2", "3", "4"]
    assert (pool.outstanding("a"), pool.outstanding("b")) == (16, 9)
    a.let_go()
    b.let_go()
    assert [len(completions) for completions in await asyncio.gather(*tasks)] == [8, 2, 2, 2, 3, 8]
    assert (pool.outstanding("a"), pool.outstanding("b")) == (0, 0)


async def test_a_dead_engine_s_requests_go_to_another():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a, "b": b})
    tasks = await started(pool.generate(request("0", PROMPT, 4)), pool.generate(request("1", PROMPT, 4)))
    a.die()
    await started()
    assert b.served == ["1", "0"]
    b.let_go()
    assert all(len(completions) == 4 for completions in await asyncio.gather(*tasks))
    assert list(await pool.stats()) == ["b"]


async def test_a_request_waits_for_the_replacement_of_the_only_engine():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a}, first_pause_s=60)
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.die()
    await started()
    assert not task.done()
    assert pool.replace("a", b) is a
    await started()
    b.let_go()
    assert len(await task) == 1
    assert b.served == ["0"]


async def test_an_engine_that_recovers_is_tried_again():
    a = Engine(is_dead=True)
    pool = EnginePool({"a": a}, first_pause_s=0.001)
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.is_dead = False
    await asyncio.wait_for(a.is_serving.wait(), 10)
    a.let_go()
    assert len(await task) == 1


@pytest.mark.parametrize("names", [["a", "b"], ["a"], []])
async def test_attempts_are_bounded(names):
    pool = EnginePool({name: Engine(is_dead=True) for name in names}, max_attempts=3, first_pause_s=0.001)
    with pytest.raises(EngineError, match="'x' failed 3 times, at last: " + ("dead" if names else "there is no engine")):
        await pool.generate(request("x", PROMPT))


async def test_a_request_at_fault_is_not_tried_again():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a, "b": b})
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.held.pop("0").set_exception(RequestError("too long"))
    with pytest.raises(RequestError, match="too long"):
        await task
    assert not b.served


async def test_abort_reaches_the_engine_that_serves():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a, "b": b})
    tasks = await started(pool.generate(request("0", PROMPT)), pool.generate(request("1", PROMPT)))
    await pool.abort(["1", "unknown"])
    assert (await tasks[1])[0].finish is FinishReason.ABORT
    a.let_go()
    assert (await tasks[0])[0].finish is FinishReason.STOP


async def test_abort_ends_a_request_that_waits_for_an_engine():
    pool = EnginePool({"a": Engine(is_dead=True)}, first_pause_s=60)
    [task] = await started(pool.generate(request("0", PROMPT, 3)))
    await pool.abort(["0"])
    assert [c.finish for c in await task] == [FinishReason.ABORT] * 3


async def test_engines_come_and_go():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a})
    pool.add("b", b)
    with pytest.raises(EngineError, match="already"):
        pool.add("b", b)
    [task] = await started(pool.generate(request("0", PROMPT)))
    assert pool.remove("a") is a
    with pytest.raises(EngineError, match="no engine 'a'; there are: b"):
        pool.remove("a")
    [second] = await started(pool.generate(request("1", PROMPT)))
    assert b.served == ["1"]
    a.let_go()
    b.let_go()
    assert len(await task) == len(await second) == 1
    await pool.close()
    assert (a.is_closed, b.is_closed) == (False, True)
