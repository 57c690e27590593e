"""Requests come, go, are aborted, refused and lost; nothing hangs and no slot stays behind."""

import asyncio

import numpy as np
import pytest
from engine_models import CONTEXT, EOS, VOCAB, StepGate, request, true_logprobs

from relax.engines.engine import RequestError
from relax.errors import EngineError
from relax.models.tiny import make_tokenizer
from relax.types import FinishReason, Media

PROMPT = [3, 4, 5, 6]


async def is_empty(engine):
    stats = await engine.stats()
    return (stats.num_running, stats.num_waiting) == (0, 0)


async def test_more_requests_than_slots_all_end_and_leave_no_slot_behind(start):
    engine = await start(max_slots=5, max_prefill_tokens=12)
    rng = np.random.default_rng(0)
    calls = []
    for i in range(40):
        prompt = rng.integers(2, VOCAB, rng.integers(1, 20)).tolist()
        calls.append(request(str(i), prompt, int(rng.integers(1, 12)), seed=100 * i, max_new_tokens=int(rng.integers(1, 15))))
    answers = await asyncio.gather(*(engine.generate(call) for call in calls))
    for call, completions in zip(calls, answers, strict=True):
        assert len(completions) == len(call.seeds)
        for c in completions:
            assert 1 <= len(c.token_ids) == len(c.logprobs) <= call.sampling.max_new_tokens
            is_full = len(c.token_ids) == call.sampling.max_new_tokens
            assert c.finish is FinishReason.STOP if c.token_ids[-1] == EOS else is_full and c.finish is FinishReason.LENGTH
            assert c.token_ids.dtype == np.int32
            assert c.logprobs.dtype == np.float32
    assert await is_empty(engine)
    stats = await engine.stats()
    assert stats.generated_tokens == sum(len(c.token_ids) for completions in answers for c in completions)
    assert stats.prefilled_tokens == sum(len(call.prompt_ids) for call in calls), "each prompt is computed once"


async def test_requests_with_their_own_settings_share_a_batch(start):
    engine = await start()
    calls = [
        request("short", PROMPT, 4, max_new_tokens=2),
        request("greedy", PROMPT, 4, temperature=0.0, max_new_tokens=30),
        request("stops", PROMPT, 4, max_new_tokens=30, stop_token_ids=tuple(range(2, VOCAB))),
        request("hot", PROMPT, 4, temperature=3.0, max_new_tokens=30),
    ]
    short, greedy, stops, hot = await asyncio.gather(*(engine.generate(call) for call in calls))
    assert all(len(c.token_ids) <= 2 for c in short)
    assert len({tuple(c.token_ids) for c in greedy}) == 1
    assert all(len(c.token_ids) <= 2 and c.finish is FinishReason.STOP for c in stops)
    assert len({tuple(c.token_ids) for c in hot}) == 4


async def test_the_context_ends_a_completion(start):
    engine = await start()
    prompt = [7] * (CONTEXT - 3)
    completions = await engine.generate(request("a", prompt, 8, max_new_tokens=100))
    for c in completions:
        assert len(c.token_ids) == 3 and c.finish is FinishReason.LENGTH if EOS not in c.token_ids else True
    assert any(c.finish is FinishReason.LENGTH for c in completions)


async def test_a_configured_context_holds(start):
    engine = await start(max_context=10)
    with pytest.raises(RequestError, match="10 tokens and the context is 10: at most 9"):
        await engine.generate(request("a", [7] * 10))
    assert all(len(c.token_ids) <= 1 for c in await engine.generate(request("a", [7] * 9, 4)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [7] * (CONTEXT + 1)}, f"{CONTEXT + 1} tokens and the context is {CONTEXT}"),
        ({"prompt": [3, VOCAB]}, f"token ids 3 to {VOCAB}, the model's are 0 to {VOCAB - 1}"),
        ({"prompt": [-1, 3]}, "token ids -1 to 3"),
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"stop": ("",)}, "stop ="),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_by_name(change, message, start):
    engine = await start()
    with pytest.raises(RequestError, match=message) as caught:
        await engine.generate(request("call-17", **{"prompt": PROMPT, **change}))
    assert "call-17" in str(caught.value)
    assert len(await engine.generate(request("b", PROMPT, 2))) == 2


async def test_media_and_doubled_ids_are_refused(start):
    engine = await start()
    call = request("a", PROMPT)
    pictured = type(call)("b", call.prompt_ids, call.seeds, call.sampling, (Media("image", "x.png"),))
    with pytest.raises(RequestError, match="media"):
        await engine.generate(pictured)
    first = asyncio.create_task(engine.generate(call))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="already"):
        await engine.generate(call)
    assert len(await first) == 1
    assert await engine.generate(type(call)("c", PROMPT, [], call.sampling)) == []


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
async def test_abort_returns_what_there_is(steps, start, models):
    engine = await start(max_slots=6)
    gate = StepGate(engine, steps)
    calls = [
        asyncio.create_task(engine.generate(request(name, PROMPT, 4, seed=seed, max_new_tokens=30)))
        for name, seed in (("a", 0), ("b", 10), ("c", 20))
    ]
    await asyncio.to_thread(gate.reached.wait)
    await engine.abort(["b", "unknown"])
    a, b, c = await asyncio.gather(*calls)
    for completion in b:
        assert len(completion.token_ids) <= steps + 1
        assert len(completion.token_ids) == len(completion.logprobs)
        assert completion.finish in (FinishReason.ABORT, FinishReason.STOP)
        if len(completion.token_ids):
            wanted = true_logprobs(models("qwen3").model, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
            assert np.allclose(completion.logprobs, wanted, atol=1e-5)
        else:
            assert completion.versions == ()
    assert any(completion.finish is FinishReason.ABORT for completion in b)
    assert all(completion.finish is not FinishReason.ABORT for completion in a + c)
    assert await is_empty(engine)


async def test_aborts_at_random_times_leave_nothing_behind(start):
    engine = await start(max_slots=4)
    rng = np.random.default_rng(1)
    for round_ in range(12):
        names = [f"{round_}-{i}" for i in range(5)]
        calls = [asyncio.create_task(engine.generate(request(n, PROMPT, 3, seed=round_, max_new_tokens=25))) for n in names]
        await asyncio.sleep(float(rng.random()) * 0.01)
        await engine.abort(rng.choice(names, 3, replace=False).tolist())
        for completions in await asyncio.gather(*calls):
            assert len(completions) == 3
    assert await is_empty(engine)


async def test_a_cancelled_call_frees_its_slots(start):
    engine = await start()
    gate = StepGate(engine, 2)
    call = asyncio.create_task(engine.generate(request("a", PROMPT, 8, max_new_tokens=40)))
    await asyncio.to_thread(gate.reached.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(await engine.generate(request("a", PROMPT, 2, max_new_tokens=1))) == 2
    assert await is_empty(engine)


async def test_close_ends_all_who_wait(start):
    engine = await start()
    StepGate(engine, 2)
    calls = [asyncio.create_task(engine.generate(request(str(i), PROMPT, 8, max_new_tokens=40))) for i in range(3)]
    await asyncio.sleep(0.02)
    await engine.close()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, EngineError)
        assert "closed" in str(outcome)
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request("later", PROMPT))
    with pytest.raises(EngineError, match="closed"):
        await engine.stats()
    await engine.abort(["later"])
    await engine.close()


async def test_a_failure_in_the_engine_reaches_all_who_wait(start, monkeypatch):
    engine = await start()
    decode, count = engine._scheduler._decode, iter(range(100))

    def broken():
        if next(count) == 3:
            raise RuntimeError("the device fell off")
        decode()

    monkeypatch.setattr(engine._scheduler, "_decode", broken)
    calls = [engine.generate(request(str(i), PROMPT, 8, max_new_tokens=40)) for i in range(3)]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, EngineError)
        assert "the device fell off" in str(outcome)
    with pytest.raises(EngineError, match="fell off"):
        await engine.generate(request("later", PROMPT))


async def test_logits_that_are_not_finite_end_their_request_alone(start, monkeypatch):
    engine = await start()
    place = engine._scheduler._place

    def poisoned(entering):
        for branch, _ in entering:
            if branch.group.request.request_id == "bad":
                branch.prefix.kv.fill_(float("nan"))
        place(entering)

    monkeypatch.setattr(engine._scheduler, "_place", poisoned)
    calls = [request(name, PROMPT, 3, seed=9, max_new_tokens=20) for name in ("a", "bad", "b")]
    a, bad, b = await asyncio.gather(*(engine.generate(call) for call in calls), return_exceptions=True)
    assert isinstance(bad, EngineError)
    assert "not finite" in str(bad)
    assert [c.token_ids.tolist() for c in a] == [c.token_ids.tolist() for c in b]
    again = await engine.generate(request("c", PROMPT, 3, seed=9, max_new_tokens=20))
    assert [c.token_ids.tolist() for c in a] == [c.token_ids.tolist() for c in again], "nothing stays in the slots"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(300, CONTEXT).save_pretrained(folder)
    return folder


async def test_stop_strings_end_a_completion_wherever_the_tokens_split(start, tokenizer_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    engine = await start(tokenizer=tokenizer_folder)
    free = await engine.generate(request("free", PROMPT, 8, max_new_tokens=25))
    text = next(t for t in (tokenizer.decode(c.token_ids) for c in free) if t.isascii() and len(t) > 12)
    stop = text[6:9]  # single bytes: three tokens
    stopped = await engine.generate(request("stopped", PROMPT, 8, max_new_tokens=25, stop=("not in any text", stop)))
    num_stopped = 0
    for before, after in zip(free, stopped, strict=True):
        assert before.token_ids[: len(after.token_ids)].tolist() == after.token_ids.tolist()
        found = tokenizer.decode(after.token_ids)
        if stop in tokenizer.decode(before.token_ids):
            num_stopped += 1
            assert found.endswith(stop)
            assert found.count(stop) == 1
            assert after.finish is FinishReason.STOP
        else:
            assert len(after.token_ids) == len(before.token_ids)
    assert num_stopped


async def test_stop_strings_without_a_tokenizer_are_an_error_that_says_so(start):
    engine = await start()
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        await engine.generate(request("a", PROMPT, stop=("x",)))
