"""An engine that sleeps has let its memory go; one that is given the weights it has does nothing."""

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from engine_models import StepGate, build, request

from relax.engines.engine import EngineAsleep
from relax.engines.kv_cache import KVCache
from relax.errors import EngineError, WeightSyncError
from relax.types import FinishReason

PROMPT = [3, 4, 5, 6]


async def answer(engine, name="a"):
    return [c.token_ids.tolist() for c in await engine.generate(request(name, PROMPT, 4))]


@pytest.fixture
def bytes_made():
    """`bytes_made()`: the size of the storages of all tensors that were made since the test began, and are alive."""
    gc.collect()
    gc.freeze()

    def count():
        gc.collect()
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type != "meta"]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())

    yield count
    gc.unfreeze()


@pytest.mark.parametrize(("kind", "use_fused"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", True)])
async def test_sleep_lets_weights_and_caches_go_and_a_version_wakes_it(kind, use_fused, start, publish, models, bytes_made):
    model = models(kind).model
    manifest = publish(model, 3)
    before = bytes_made()
    engine = await start(kind, use_fused_forward=use_fused, load=False)
    await engine.load_weights(manifest)
    wanted = await answer(engine)
    cache = weakref.ref(engine._scheduler._cache._data)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert bytes_made() - before > size
    await engine.sleep()
    gc.collect()
    assert cache() is None
    assert bytes_made() - before < 0.1 * size + 256 * 8 * 2 * 4, "rotary angles of the first 256 positions may stay"
    assert (await engine.stats()).version == -1
    with pytest.raises(EngineAsleep, match="sleeps"):
        await engine.generate(request("b", PROMPT))
    await engine.sleep()
    await engine.load_weights(manifest)
    assert (await engine.stats()).version == 3
    assert await answer(engine) == wanted


async def test_an_engine_with_requests_in_hand_does_not_fall_asleep(start):
    engine = await start(max_slots=3)
    gate = StepGate(engine, 3)
    running = asyncio.create_task(engine.generate(request("a", PROMPT, 5, max_new_tokens=20)))
    await asyncio.to_thread(gate.reached.wait)
    with pytest.raises(EngineError, match=r"cannot sleep: \d completions are in hand"):
        await engine.sleep()
    assert all(c.finish is not FinishReason.ABORT for c in await running)
    await engine.sleep()


async def test_a_request_that_comes_while_it_falls_asleep_is_told_so(start):
    engine = await start()
    asleep = asyncio.create_task(engine.sleep())
    results = await asyncio.gather(*(engine.generate(request(str(i), PROMPT)) for i in range(20)), return_exceptions=True)
    try:
        await asleep
    except EngineError:
        assert all(isinstance(result, list) for result in results)
    else:
        assert all(isinstance(result, list | EngineAsleep) for result in results)


async def test_a_bad_version_leaves_it_asleep(start, publish):
    engine = await start()
    await engine.sleep()
    newer = build("qwen3", seed=1)
    weights = {name: p.detach().clone() for name, p in newer.named_parameters()}
    weights["model.norm.weight"] *= 2
    with pytest.raises(WeightSyncError, match="canary"):
        await engine.load_weights(publish(newer, 1, weights=weights))
    with pytest.raises(EngineAsleep):
        await engine.generate(request("a", PROMPT))
    await engine.load_weights(publish(newer, 1))
    assert len(await engine.generate(request("a", PROMPT))) == 1


async def test_an_engine_that_never_had_weights_can_sleep(start, publish, models):
    engine = await start(load=False)
    await engine.sleep()
    with pytest.raises(EngineAsleep):
        await engine.generate(request("a", PROMPT))
    await engine.load_weights(publish(models("qwen3").model, 0))
    assert len(await engine.generate(request("a", PROMPT))) == 1


async def test_a_lower_version_is_taken(start, publish, models):
    engine = await start()
    await engine.load_weights(publish(build("qwen3", seed=1), 9))
    await engine.load_weights(publish(models("qwen3").model, 2))
    assert (await engine.stats()).version == 2


# -- weights that it has already ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
async def test_the_same_weights_under_a_new_version_flush_nothing(kind, start, publish, models, monkeypatch):
    engine = await start(kind, max_slots=2)
    wanted = await answer(engine, "before")
    monkeypatch.setattr("relax.engines.policy.read_buckets", lambda manifest: pytest.fail("it was read"))
    monkeypatch.setattr(KVCache, "clear", lambda *_: pytest.fail("the cache was flushed"))
    gate = StepGate(engine, 1)
    running = asyncio.create_task(engine.generate(request("a", PROMPT, 4)))
    await asyncio.to_thread(gate.reached.wait)
    forward, loads = engine._policy.forward, engine._scheduler._num_loads
    prefix = engine._scheduler._waiting[0].prefix
    assert prefix is not None
    assert await engine.load_weights(publish(models(kind).model, 5)) < 1e-5
    assert engine._policy.forward is forward
    assert engine._scheduler._num_loads == loads
    completions = await running
    assert [c.token_ids.tolist() for c in completions] == wanted
    assert [s.version for s in completions[0].versions][-1] == 5 or len(completions[0].token_ids) <= 2
    assert completions[-1].versions[0].version == 5
    assert (await engine.stats()).prefilled_tokens == 2 * len(PROMPT), "the prompt was not computed anew"


async def test_the_same_version_again_changes_nothing(start, publish, models, monkeypatch):
    engine = await start()
    monkeypatch.setattr("relax.engines.policy.read_buckets", lambda manifest: pytest.fail("it was read"))
    await engine.load_weights(publish(models("qwen3").model, 0))
    [completion] = await engine.generate(request("a", PROMPT))
    assert len(completion.versions) == 1


async def test_equal_weights_with_another_canary_are_not_believed(start, publish, models):
    engine = await start()
    manifest = publish(models("qwen3").model, 1)
    wrong = tuple(x + 1 for x in manifest.canary_logprobs)
    with pytest.raises(WeightSyncError, match="canary's log-prob differs"):
        await engine.load_weights(replace(manifest, canary_logprobs=wrong))
    assert (await engine.stats()).version == 0
