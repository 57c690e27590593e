"""A pool serves by the least loaded engine and survives those that fail."""

import asyncio

import pytest
from engine_models import request
from pool_engine import Engine, completion, serving, started, until

from relax.engines.engine import RequestError
from relax.engines.pool import EnginePool
from relax.errors import EngineError
from relax.types import FinishReason

PROMPT = [3, 4, 5]


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


# -- continued from where they were ---------------------------------------------------------------------------------------
async def test_a_lost_request_goes_on_from_the_tokens_that_were_told():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a, "b": b}, progress_s=0.001)
    [task] = await started(pool.generate(request("0", PROMPT, 2)))
    assert a.calls[0].partials == ()
    a.tokens = (5, 6, 7)
    seen = a.num_asked
    await until(lambda: a.num_asked > seen + 1)
    a.die()
    await serving(b)
    assert [c.token_ids.tolist() for c in b.calls[0].partials] == [[5, 6, 7]] * 2
    assert all(c.finish is FinishReason.ABORT for c in b.calls[0].partials)
    assert b.calls[0].seeds == a.calls[0].seeds
    b.let_go()
    assert len(await task) == 2


async def test_it_goes_on_on_the_replaced_engine_and_again_on_the_next_one():
    engines = [Engine() for _ in range(3)]
    pool = EnginePool({"a": engines[0]}, progress_s=0.001)
    [task] = await started(pool.generate(request("0", PROMPT)))
    for number in (1, 2):
        before, after = engines[number - 1], engines[number]
        before.tokens = tuple(range(2, 2 + 3 * number))
        seen = before.num_asked
        await until(lambda before=before, seen=seen: before.num_asked > seen + 1)
        before.die()
        pool.replace("a", after)
        await serving(after)
        assert after.calls[0].partials[0].token_ids.tolist() == list(before.tokens)
    engines[2].let_go()
    await task


async def test_less_than_was_known_is_not_believed():
    a, b, c = Engine(), Engine(), Engine()
    pool = EnginePool({"a": a, "b": b, "c": c}, progress_s=0.001)
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.tokens = (5, 6, 7)
    await until(lambda: a.num_asked > 2)
    a.die()
    await serving(b)
    b.tokens = (5,)
    await until(lambda: b.num_asked > 2)
    b.die()
    await serving(c)
    assert c.calls[0].partials[0].token_ids.tolist() == [5, 6, 7]
    c.let_go()
    await task


async def test_only_requests_that_last_are_asked_for_and_only_while_there_are_some():
    a = Engine()
    pool = EnginePool({"a": a}, progress_s=0.02)
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.let_go()
    await task
    await asyncio.sleep(0.05)
    assert a.num_asked == 0
    assert pool._tasks == {}


async def test_a_request_that_was_complete_when_its_engine_died_is_done():
    a, b = Engine(), Engine()
    pool = EnginePool({"a": a, "b": b}, progress_s=0.001)

    async def progress(names):
        a.num_asked += 1
        return {name: [completion((5, 1))] for name in names}

    a.progress = progress
    [task] = await started(pool.generate(request("0", PROMPT)))
    await until(lambda: a.num_asked > 1)
    a.die()
    assert (await task)[0].token_ids.tolist() == [5, 1]
    assert not b.served


async def test_an_abort_while_no_engine_is_there_returns_the_tokens_so_far():
    a = Engine()
    pool = EnginePool({"a": a}, progress_s=0.001)
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.tokens = (5, 6)
    seen = a.num_asked
    await until(lambda: a.num_asked > seen + 1)
    a.die()
    await started()
    assert not task.done()
    await pool.abort(["0"])
    [found] = await task
    assert found.token_ids.tolist() == [5, 6]
    assert found.finish is FinishReason.ABORT


# -- engines that are down ------------------------------------------------------------------------------------------------
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


async def test_an_engine_that_recovers_is_used_again():
    a = Engine(is_dead=True)
    pool = EnginePool({"a": a})
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.is_dead = False
    await serving(a)
    a.let_go()
    assert len(await task) == 1


@pytest.mark.parametrize("names", [["a", "b"], []])
async def test_down_for_too_long_is_an_error_with_the_reasons(names):
    pool = EnginePool({name: Engine(is_dead=True) for name in names}, max_down_s=0.03)
    reason = "a: dead; b: dead" if names else "there is no engine"
    for name in "xy":  # the time counts anew once nobody has waited
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineError, match=rf"'{name}': no engine has answered for 0.03 s \({reason}\)"):
            await pool.generate(request(name, PROMPT))
        assert asyncio.get_running_loop().time() - started_s >= 0.03


async def test_the_time_without_engines_is_one_for_all_requests():
    pool = EnginePool({"a": Engine(is_dead=True)}, max_down_s=0.2)
    [first] = await started(pool.generate(request("0", PROMPT)))
    await asyncio.sleep(0.1)
    second = asyncio.create_task(pool.generate(request("1", PROMPT)))
    await asyncio.wait([first, second])
    assert isinstance(first.exception(), EngineError)
    assert isinstance(second.exception(), EngineError)


async def test_a_dead_engine_costs_many_requests_no_attempts_each():
    a = Engine()
    pool = EnginePool({"a": a}, max_attempts=2)
    tasks = await started(*(pool.generate(request(str(i), PROMPT)) for i in range(20)))
    a.die()
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    a.is_dead = False
    await until(lambda: len(a.held) == 20)
    a.let_go()
    assert all(len(completions) == 1 for completions in await asyncio.gather(*tasks))


# -- engines without weights ----------------------------------------------------------------------------------------------
async def test_a_sleeping_engine_is_waited_for_without_attempts():
    a = Engine()
    a.is_asleep = True
    pool = EnginePool({"a": a}, max_attempts=1, max_down_s=0.01)
    tasks = await started(*(pool.generate(request(str(i), PROMPT)) for i in range(3)))
    await until(lambda: a.num_looked_at > 2)
    assert not any(task.done() for task in tasks)
    a.is_asleep = False
    await until(lambda: len(a.held) == 3)
    a.let_go()
    assert all(len(completions) == 1 for completions in await asyncio.gather(*tasks))


async def test_an_engine_that_falls_asleep_gives_its_turn_to_one_that_is_awake():
    a, b = Engine(), Engine()
    a.is_asleep = True
    pool = EnginePool({"a": a, "b": b})
    tasks = await started(*(pool.generate(request(str(i), PROMPT)) for i in range(3)))
    assert b.served == ["0", "1", "2"]
    b.let_go()
    await asyncio.gather(*tasks)


async def test_a_replacement_without_weights_is_waited_for_without_attempts():
    a, b = Engine(), Engine(version=-1)
    pool = EnginePool({"a": a}, max_attempts=2, max_down_s=0.01)
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.die()
    pool.replace("a", b)
    await asyncio.sleep(0.05)
    assert not task.done()
    b.version = 7
    await serving(b)
    b.let_go()
    assert len(await task) == 1


async def test_abort_ends_a_request_that_waits_for_an_engine():
    for engine in (Engine(is_dead=True), Engine(version=-1)):
        pool = EnginePool({"a": engine}, first_pause_s=60)
        [task] = await started(pool.generate(request("0", PROMPT, 3)))
        await pool.abort(["0"])
        assert [c.finish for c in await task] == [FinishReason.ABORT] * 3


# -- requests that fail ---------------------------------------------------------------------------------------------------
async def test_attempts_on_engines_that_answer_are_bounded():
    a, b = Engine(), Engine()

    async def broken(call):
        raise EngineError("the model's logits are not finite")

    a.generate = b.generate = broken
    pool = EnginePool({"a": a, "b": b}, max_attempts=3, first_pause_s=0.001)
    with pytest.raises(EngineError, match="'x' failed 3 times in a row, at last: the model's logits are not finite"):
        await pool.generate(request("x", PROMPT))


async def test_attempts_that_brought_new_tokens_do_not_add_up():
    a = Engine()
    pool = EnginePool({"a": a}, max_attempts=2, first_pause_s=0.001, progress_s=0.001)
    [task] = await started(pool.generate(request("0", PROMPT)))
    for round_ in range(1, 5):
        await serving(a)
        a.tokens = tuple(range(2, 2 + round_))
        seen = a.num_asked
        await until(lambda seen=seen: a.num_asked > seen + 1)
        a.fail(EngineError("once more"))
    await serving(a)
    a.let_go()
    assert (await task)[0].token_ids.tolist() == [2, 3, 4, 5]


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


async def test_an_engine_that_dies_while_it_should_abort_does_not_lose_the_request():
    a = Engine()
    pool = EnginePool({"a": a})
    [task] = await started(pool.generate(request("0", PROMPT)))
    a.is_dead = True
    await pool.abort(["0"])
    a.die()
    assert (await task)[0].finish is FinishReason.ABORT


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


async def test_an_engine_is_told_another_name_each_time():
    """What a lost pool or a lost connection left behind on an engine is not in the way."""
    a = Engine()
    pools = [EnginePool({"a": a}, first_pause_s=0.001), EnginePool({"a": a})]
    [task] = await started(pools[0].generate(request("0", PROMPT)))
    a.fail(EngineError("the connection broke"))
    await until(lambda: len(a.calls) == 2)
    await started(pools[1].generate(request("0", PROMPT)))
    assert len({call.request_id for call in a.calls}) == 3
    a.let_go()
    task.cancel()


async def test_a_cancelled_call_is_aborted_on_its_engine():
    a = Engine()
    pool = EnginePool({"a": a})
    [task] = await started(pool.generate(request("0", PROMPT)))
    task.cancel()
    await until(lambda: a.aborted)
    assert a.aborted == [a.calls[0].request_id]
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.outstanding("a") == 0
