"""Each sampled token's log-prob is that of a full transformers forward under the version that sampled it."""

import asyncio

import pytest
import torch
from engine_models import EOS, StepGate, build, request, true_logprobs

from relax.types import FinishReason, VersionSegment

KINDS = ["qwen3", "llama", "qwen2", "qwen3_moe"]
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [20], [21, 22, 23]]


def difference(model, prompt, completion, temperature=1.0, end=None):
    """The largest difference over the first `end` sampled tokens."""
    wanted = true_logprobs(model, [*prompt, *completion.token_ids], temperature)[len(prompt) - 1 :]
    return float((torch.from_numpy(completion.logprobs) - wanted)[:end].abs().max())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_equal_a_full_forward(kind, deterministic, start, models):
    engine = await start(kind, deterministic=deterministic, max_slots=6, max_prefill_tokens=9)
    temperatures = [1.0, 0.5, 2.0, 1.0]
    calls = [
        engine.generate(request(str(i), prompt, 3, seed=10 * i, temperature=t, max_new_tokens=6 + 5 * i))
        for i, (prompt, t) in enumerate(zip(PROMPTS, temperatures, strict=True))
    ]
    for prompt, t, completions in zip(PROMPTS, temperatures, await asyncio.gather(*calls), strict=True):
        assert len(completions) == 3
        assert all(difference(models(kind).model, prompt, c, t) < 1e-5 for c in completions)


async def test_transformers_own_forward_and_the_fused_one_agree(start):
    answers = []
    for use_fused in (True, False):
        engine = await start("qwen3", use_fused_forward=use_fused)
        answers.append(await engine.generate(request("a", PROMPTS[1], 4)))
    for fused, plain in zip(*answers, strict=True):
        assert fused.token_ids.tolist() == plain.token_ids.tolist()
        assert torch.allclose(torch.from_numpy(fused.logprobs), torch.from_numpy(plain.logprobs), atol=1e-5)


async def test_bfloat16_stays_near_the_truth(start, models):
    engine = await start("qwen3", dtype=torch.bfloat16)
    completions = await engine.generate(request("a", PROMPTS[1], 8))
    assert max(difference(models("qwen3", torch.bfloat16).model, PROMPTS[1], c) for c in completions) < 0.15


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
async def test_each_token_belongs_to_the_version_that_sampled_it(kind, start, models, publish):
    engine = await start(kind)
    newer = build(kind, seed=1)
    gate = StepGate(engine, steps=5)
    running = asyncio.create_task(engine.generate(request("a", PROMPTS[0], 16, max_new_tokens=20)))
    await asyncio.to_thread(gate.reached.wait)
    await engine.load_weights(publish(newer, 7))
    completions = await running
    crossed = [c for c in completions if len(c.token_ids) > 6]
    assert crossed
    for completion in crossed:
        assert completion.versions == (VersionSegment(0, 0), VersionSegment(6, 7))  # the first step gives two tokens
        assert difference(models(kind).model, PROMPTS[0], completion, end=6) < 1e-5
    for completion in completions:
        if len(completion.token_ids) <= 6:
            assert completion.versions == (VersionSegment(0, 0),)
    # The keys and values of the first tokens stay those of the old weights, so later tokens differ from a forward of the
    # new ones alone; but they are nothing like the old ones'.
    assert max(difference(models(kind).model, PROMPTS[0], c) for c in crossed) > 0.5


async def test_a_prompt_that_waits_uses_the_weights_of_its_turn(start, publish):
    engine = await start(max_slots=2)
    newer = build("qwen3", seed=1)
    gate = StepGate(engine, steps=1)
    # Six seeds in two slots: the prompt was computed under version 0 and is computed anew under version 1.
    running = asyncio.create_task(engine.generate(request("a", PROMPTS[1], 6, max_new_tokens=8)))
    await asyncio.to_thread(gate.reached.wait)
    await engine.load_weights(publish(newer, 1))
    later = [c for c in await running if c.versions[0].version == 1]
    assert len(later) >= 4
    assert all(difference(newer, PROMPTS[1], c) < 1e-5 for c in later)


async def test_greedy_is_the_likeliest_token_with_its_logprob(start, models):
    engine = await start("llama")
    [first, second] = await engine.generate(request("a", PROMPTS[0], 2, temperature=0.0))
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert difference(models("llama").model, PROMPTS[0], first) < 1e-5
    logits = models("llama").model(torch.tensor([[*PROMPTS[0], *first.token_ids]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    assert logits.argmax(-1).tolist() == first.token_ids.tolist()


async def test_nucleus_and_top_k_are_those_of_the_request_alone(start, models):
    engine = await start("qwen3")
    free, narrow = await asyncio.gather(
        engine.generate(request("free", PROMPTS[0], 8)), engine.generate(request("narrow", PROMPTS[0], 8, top_k=1))
    )
    assert len({tuple(c.token_ids) for c in free}) > 1
    assert len({tuple(c.token_ids) for c in narrow}) == 1
    assert all((c.logprobs == 0).all() for c in narrow)
    assert all(difference(models("qwen3").model, PROMPTS[0], c) < 1e-5 for c in free)


async def test_the_end_token_is_the_last_one(start):
    engine = await start()
    completions = await engine.generate(request("a", PROMPTS[0], 32, max_new_tokens=40))
    ended = [c for c in completions if c.finish is FinishReason.STOP]
    assert ended
    for completion in completions:
        assert (completion.token_ids[-1] == EOS) == (completion.finish is FinishReason.STOP)
        assert EOS not in completion.token_ids[:-1]
