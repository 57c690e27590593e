"""The same seed gives the same tokens, whatever else is in the batch."""

import asyncio
import itertools

import numpy as np
import pytest
from engine_models import VOCAB, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PROBE = [5, 6, 7, 8, 9]
NUMBERS = itertools.count()

company = st.lists(
    st.tuples(
        st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=30),  # prompt
        st.integers(1, 6),  # completions
        st.integers(1, 20),  # longest
        st.sampled_from([0.0, 0.7, 1.0]),
        st.sampled_from([1.0, 0.8]),
    ),
    max_size=8,
)


def bits(completions):
    return [(c.token_ids.tolist(), c.logprobs.view(np.uint32).tolist()) for c in completions]


async def probe_in(engine, others, place):
    calls = [
        request(f"other-{next(NUMBERS)}", prompt, num, seed=1000, max_new_tokens=longest, temperature=t, top_p=p)
        for prompt, num, longest, t, p in others
    ]
    calls.insert(min(place, len(calls)), request(f"probe-{next(NUMBERS)}", PROBE, 4, max_new_tokens=16))
    answers = await asyncio.gather(*(engine.generate(call) for call in calls))
    return answers[min(place, len(others))]


@pytest.mark.parametrize(
    ("kind", "num_examples"),
    [("qwen3", 4), *(pytest.param(kind, num, marks=pytest.mark.slow) for kind, num in (("qwen3", 100), ("qwen3_moe", 20)))],
)
async def test_bit_equal_in_any_company_when_deterministic(kind, num_examples, start):
    engine = await start(kind, deterministic=True, max_slots=40, max_prefill_tokens=50)
    wanted = bits(await probe_in(engine, [], 0))
    loop = asyncio.get_running_loop()

    @given(company, st.integers(0, 8))
    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def check(others, place):
        found = asyncio.run_coroutine_threadsafe(probe_in(engine, others, place), loop).result(60)
        assert bits(found) == wanted

    await asyncio.to_thread(check)


async def test_equal_to_rounding_in_any_company_otherwise(start):
    engine = await start(max_slots=10, max_prefill_tokens=50)
    alone = await probe_in(engine, [], 0)
    rng = np.random.default_rng(0)
    for place in range(4):
        others = [(rng.integers(2, VOCAB, rng.integers(1, 30)).tolist(), 3, 12, 1.0, 1.0) for _ in range(6)]
        for found, wanted in zip(await probe_in(engine, others, place), alone, strict=True):
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            assert np.allclose(found.logprobs, wanted.logprobs, atol=1e-5)


async def test_seeds_alone_decide_and_differ(start):
    engine = await start()
    once = await engine.generate(request("a", PROBE, 6, seed=50))
    again = await engine.generate(request("b", PROBE, 6, seed=53))
    assert bits(once)[3:] == bits(again)[:3]
    assert len({tuple(c.token_ids) for c in once}) == 6
