"""What was begun goes on as if it had never stopped: the same tokens, on any engine, from any point."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from engine_models import CONTEXT, EOS, VOCAB, StepGate, build, request, true_logprobs

from relax.engines.engine import RequestError
from relax.engines.pool import EnginePool
from relax.models.tiny import make_tokenizer
from relax.types import Completion, FinishReason, VersionSegment

PROMPT = [3, 4, 5, 6]
OTHERS = [([7] * 9, 3, 14), ([8, 9], 5, 30), ([10] * 20, 2, 5)]


def cut(completion, num):
    """The first `num` tokens, or what ended before."""
    if num >= len(completion.token_ids):
        return completion
    versions = tuple(segment for segment in completion.versions if segment.start < num)
    return Completion(completion.token_ids[:num], completion.logprobs[:num], versions, FinishReason.ABORT)


def bits(completions):
    return [(c.token_ids.tolist(), c.logprobs.view(np.uint32).tolist(), c.versions, c.finish) for c in completions]


async def in_company(engine, call):
    """The answer to `call` while the engine serves others."""
    others = [engine.generate(request(f"o{i}", p, n, seed=50, max_new_tokens=m)) for i, (p, n, m) in enumerate(OTHERS)]
    return (await asyncio.gather(*others, engine.generate(call)))[-1]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
async def test_a_continued_completion_is_the_uninterrupted_one(kind, deterministic, start):
    first = await start(kind, deterministic=deterministic)
    second = await start(kind, deterministic=deterministic, max_slots=7, max_prefill_tokens=16)
    call = request("a", PROMPT, 6, seed=20, max_new_tokens=25, temperature=0.8)
    whole = await first.generate(call)
    rng = np.random.default_rng(0)
    for round_ in range(2):
        partials = tuple(cut(c, int(rng.integers(0, 25))) for c in whole)
        found = await in_company(second, replace(call, request_id=f"b{round_}", partials=partials))
        if deterministic:
            assert bits(found) == bits(whole)
        for old, new, partial in zip(whole, found, partials, strict=True):
            assert new.token_ids.tolist() == old.token_ids.tolist()
            assert (new.finish, new.versions) == (old.finish, old.versions)
            assert np.allclose(new.logprobs, old.logprobs, atol=1e-5)
            num = len(partial.token_ids)
            assert new.logprobs[:num].tolist() == old.logprobs[:num].tolist(), "old log-probs are not touched"


@pytest.mark.parametrize("deterministic", [False, True])
async def test_abort_and_go_on_any_number_of_times(deterministic, start):
    engine = await start(deterministic=deterministic)
    call = request("a", PROMPT, 5, seed=20, max_new_tokens=30)
    whole, partials = await engine.generate(call), ()
    for round_ in range(6):
        gate = StepGate(engine, 3)
        running = asyncio.create_task(engine.generate(replace(call, request_id=str(round_), partials=partials)))
        waiting = asyncio.create_task(asyncio.to_thread(gate.reached.wait))
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        gate.reached.set()
        await engine.abort([str(round_)])
        partials = tuple(await running)
        engine._scheduler.step = gate._step
        for old, now in zip(whole, partials, strict=True):
            assert old.token_ids[: len(now.token_ids)].tolist() == now.token_ids.tolist()
    found = await engine.generate(replace(call, request_id="last", partials=partials))
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in whole]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_old_tokens_keep_their_version_and_new_ones_get_theirs(deterministic, start, publish):
    engine = await start(deterministic=deterministic)
    call = request("a", PROMPT, 8, seed=20, max_new_tokens=20)
    partials = tuple(cut(c, 6) for c in await engine.generate(call))
    newer = build("qwen3", seed=1)
    await engine.load_weights(publish(newer, 4))
    found = await engine.generate(replace(call, partials=partials))
    continued = [c for c, p in zip(found, partials, strict=True) if p.finish is FinishReason.ABORT]
    assert continued
    for completion in continued:
        assert completion.versions == (VersionSegment(0, 0), VersionSegment(6, 4))
        # The old tokens' keys and values are computed anew, so that new tokens are of the new version alone.
        wanted = true_logprobs(newer, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        assert np.allclose(completion.logprobs[6:], wanted[6:], atol=1e-5)
    for completion, partial in zip(found, partials, strict=True):
        assert completion.logprobs[: len(partial.logprobs)].tolist() == partial.logprobs.tolist()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_is_complete_comes_back_as_it_is(deterministic, start):
    engine = await start(deterministic=deterministic)
    call = request("a", PROMPT, 3, max_new_tokens=6)
    done = Completion(np.array([9, EOS], np.int32), np.array([-1, -2], np.float32), (VersionSegment(0, -5),), FinishReason.STOP)
    full = replace(done, token_ids=np.arange(2, 8, dtype=np.int32), logprobs=np.ones(6, np.float32), finish=FinishReason.ABORT)
    at_end = replace(done, finish=FinishReason.ABORT)
    before = (await engine.stats()).prefilled_tokens
    found = await engine.generate(replace(call, partials=(done, full, at_end)))
    assert [c.finish for c in found] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    assert [c.token_ids.tolist() for c in found] == [[9, EOS], list(range(2, 8)), [9, EOS]]
    assert (await engine.stats()).prefilled_tokens == before


async def test_the_limit_and_the_context_count_old_tokens(start):
    engine = await start()
    old = np.full(5, 7, np.int32)
    partial = Completion(old, np.zeros(5, np.float32), (VersionSegment(0, 0),), FinishReason.ABORT)
    [found] = await engine.generate(replace(request("a", PROMPT, max_new_tokens=7), partials=(partial,)))
    assert len(found.token_ids) == 7 or found.finish is FinishReason.STOP
    prompt = [7] * (CONTEXT - 6)
    [found] = await engine.generate(replace(request("b", prompt, max_new_tokens=50), partials=(partial,)))
    assert len(found.token_ids) == 6
    prompt = [7] * (CONTEXT - 5)
    [found] = await engine.generate(replace(request("c", prompt, max_new_tokens=50), partials=(partial,)))
    assert (found.token_ids.tolist(), found.finish) == (old.tolist(), FinishReason.LENGTH)


async def test_seeds_without_tokens_share_the_prompt(start):
    engine = await start(max_slots=3)
    call = request("a", PROMPT, 6, seed=20, max_new_tokens=10)
    whole = await engine.generate(call)
    before = (await engine.stats()).prefilled_tokens
    partials = tuple(cut(c, 4 if i == 2 else 0) for i, c in enumerate(whole))
    found = await engine.generate(replace(call, request_id="b", partials=partials))
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in whole]
    num = len(PROMPT) + (len(PROMPT) + 4 if partials[2].finish is FinishReason.ABORT else 0)
    assert (await engine.stats()).prefilled_tokens == before + num


async def test_only_new_tokens_are_counted_as_generated(start):
    for deterministic in (False, True):
        engine = await start(deterministic=deterministic)
        call = request("a", PROMPT, 4, seed=20, max_new_tokens=12)
        whole = await engine.generate(call)
        before = (await engine.stats()).generated_tokens
        partials = tuple(cut(c, 5) for c in whole)
        await engine.generate(replace(call, request_id="b", partials=partials))
        new = sum(len(w.token_ids) - len(p.token_ids) for w, p in zip(whole, partials, strict=True))
        assert (await engine.stats()).generated_tokens == before + new


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_stop_string_across_the_cut_is_found(deterministic, start, tmp_path):
    from transformers import AutoTokenizer

    make_tokenizer(300, CONTEXT).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    engine = await start(tokenizer=tmp_path, deterministic=deterministic)
    free = await engine.generate(request("free", PROMPT, 8, max_new_tokens=25))
    texts = [(i, tokenizer.decode(c.token_ids)) for i, c in enumerate(free)]
    index, text = next((i, t) for i, t in texts if t.isascii() and len(t) > 12)
    call = request("a", PROMPT, 1, seed=index, max_new_tokens=25, stop=(text[6:9],))  # single bytes: three tokens
    [wanted] = await engine.generate(call)
    assert wanted.finish is FinishReason.STOP
    end = len(wanted.token_ids)
    for num in (end - 1, end - 2, end - 3, 1):
        partial = cut(free[index], num)
        [found] = await engine.generate(replace(call, request_id=str(num), partials=(partial,)))
        assert (found.token_ids.tolist(), found.finish) == (wanted.token_ids.tolist(), FinishReason.STOP)
    [found] = await engine.generate(replace(call, request_id="whole", partials=(cut(free[index], end),)))
    assert (found.token_ids.tolist(), found.finish) == (wanted.token_ids.tolist(), FinishReason.STOP)


async def test_a_pool_goes_on_where_a_lost_engine_was(start):
    """Real engines: one ends in the middle, the other one goes on bit by bit."""
    lost, other = await start(deterministic=True), await start(deterministic=True)
    call = request("a", PROMPT, 6, seed=20, max_new_tokens=30)
    whole = await other.generate(call)
    pool = EnginePool({"lost": lost}, progress_s=0.001)
    StepGate(lost, 12)
    running = asyncio.create_task(pool.generate(call))
    while not pool._routes or not pool._routes["a"].num_tokens:  # noqa: ASYNC110 - it has no event of its own
        await asyncio.sleep(0.001)
    pool.replace("lost", other)
    before = (await other.stats()).generated_tokens
    await lost.close()
    assert bits(await running) == bits(whole)
    assert (await other.stats()).generated_tokens - before < sum(len(c.token_ids) for c in whole)


# -- progress -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("deterministic", [False, True])
async def test_progress_tells_what_there_is_and_can_be_gone_on_from(deterministic, start):
    engine = await start(deterministic=deterministic, max_slots=6)
    other = await start(deterministic=deterministic)
    calls = [request(name, PROMPT, 4, seed=seed, max_new_tokens=30) for name, seed in (("a", 20), ("b", 40), ("c", 60))]
    gate = StepGate(engine, 5)
    running = [asyncio.create_task(engine.generate(call)) for call in calls]
    await asyncio.to_thread(gate.reached.wait)
    told = await engine.progress(["a", "b", "c", "unknown"])
    whole = dict(zip("abc", await asyncio.gather(*running), strict=True))
    assert set(told) == {"a", "b", "c"}
    lengths = [len(c.token_ids) for c in told["a"]]
    assert max(lengths) >= 5
    assert any(not len(c.token_ids) for c in told["c"]), "six slots for twelve completions"
    for call in calls:
        name = call.request_id
        for now, end in zip(told[name], whole[name], strict=True):
            assert now.token_ids.tolist() == end.token_ids[: len(now.token_ids)].tolist()
            assert now.logprobs.tolist() == end.logprobs[: len(now.token_ids)].tolist()
            assert (now.finish is FinishReason.ABORT) == (len(now.token_ids) < len(end.token_ids))
        found = await other.generate(replace(call, partials=tuple(told[name])))
        assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in whole[name]]
    assert await engine.progress(["a", "b", "c"]) == {}


async def test_tokens_that_are_replayed_are_there_all_the_time(start):
    engine = await start(deterministic=True)
    call = request("a", PROMPT, 4, seed=20, max_new_tokens=30)
    partials = tuple(cut(c, 10) for c in await engine.generate(call))
    gate = StepGate(engine, 2)
    running = asyncio.create_task(engine.generate(replace(call, partials=partials)))
    await asyncio.to_thread(gate.reached.wait)
    assert bits((await engine.progress(["a"]))["a"]) == bits(partials)
    await engine.abort(["a"])
    assert bits(await running) == bits(partials)


# -- what is refused ------------------------------------------------------------------------------------------------------
def partial(tokens=(5,), num_logprobs=None, starts=(0,)):
    logprobs = np.zeros(len(tokens) if num_logprobs is None else num_logprobs, np.float32)
    return Completion(np.array(tokens, np.int32), logprobs, tuple(VersionSegment(s, 0) for s in starts), FinishReason.ABORT)


@pytest.mark.parametrize(
    ("partials", "message"),
    [
        ((partial(),), "1 partial completions for 2 seeds"),
        ((partial(), partial(num_logprobs=3)), "partial completion 1 has 3 log-probs for 1 tokens"),
        ((partial(), partial(starts=())), r"segments that begin at \[\]"),
        ((partial(), partial(starts=(1,))), r"segments that begin at \[1\]"),
        ((partial((5, 6), starts=(0, 1, 1)), partial()), r"partial completion 0 has version segments"),
        ((partial((5, VOCAB)), partial()), "token ids outside of the model's, 0 to 95"),
        ((partial((5,) * CONTEXT), partial()), f"{CONTEXT} tokens after a prompt of 4, and the context is {CONTEXT}"),
    ],
)
async def test_partials_that_are_none_are_refused(partials, message, start):
    engine = await start()
    with pytest.raises(RequestError, match=message):
        await engine.generate(replace(request("a", PROMPT, 2), partials=partials))
