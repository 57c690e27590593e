"""The embedded engine hears: transformers' own tokens and log-probs, a sound encoded once for all seeds."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_models import Publisher, StepGate
from transformers import WhisperForConditionalGeneration

from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.engine import RequestError
from relax.engines.local import LocalEngine
from relax.models.forward import make_forward
from relax.models.whisper_processor import WhisperReader
from relax.types import FinishReason, GenerateRequest, Sampling
from tests.whisper_prompts import ask, own_logprobs, uneven


@pytest.fixture(scope="module")
def case(tiny_omni):
    """Two models of other weights, and prompts of several lengths."""
    folder = tiny_omni("whisper")
    models = [uneven(WhisperForConditionalGeneration.from_pretrained(folder)) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    reader = WhisperReader(folder)
    prompts = [ask(reader, 0.4), ask(reader, 1.0, 1, before="Smith"), ask(reader, 2.0, 2), ask(reader, 0.4, 3)]
    return SimpleNamespace(folder=folder, models=models, prompts=prompts)


@pytest.fixture
async def start(case, tmp_path):
    publisher, engines = Publisher(tmp_path), []

    async def make(*, deterministic=False, **config):
        model = ModelConfig(path=str(case.folder))
        engine = LocalEngine(model, LocalEngineConfig(device="cpu", **config), deterministic=deterministic)
        engines.append(engine)

        async def publish(version, which=0):
            await engine.load_weights(publisher(OfText(case.models[which]), version))

        await publish(0)
        return SimpleNamespace(engine=engine, publish=publish)

    yield make
    await asyncio.gather(*(engine.close() for engine in engines))


class OfText:
    """What the publisher asks of a model: the names of the whole, and a pass of the decoder alone, which hears nothing."""

    def __init__(self, whole):
        self._whole, self._media_ids = whole, list(make_forward(whole).media_ids)

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def __call__(self, ids):
        logits = self._whole.proj_out(self._whole.model.decoder(input_ids=ids).last_hidden_state)
        logits[..., self._media_ids] = -torch.inf
        return SimpleNamespace(logits=logits)


def request(name, prompt, num=1, *, seed=0, max_new_tokens=10, **sampling):
    seeds, how = tuple(range(seed, seed + num)), Sampling(max_new_tokens=max_new_tokens, **sampling)
    return GenerateRequest(name, prompt.ids.tolist(), seeds, how, features=prompt.features)


@torch.no_grad()
def logprobs_of(case, prompt, completion, which=0):
    return own_logprobs(case.models[which], prompt, completion.token_ids).numpy()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_greedy_tokens_are_those_of_generate(case, start, deterministic) -> None:
    running = await start(deterministic=deterministic)
    calls = [request(str(n), prompt, temperature=0.0, max_new_tokens=8) for n, prompt in enumerate(case.prompts)]
    found = await asyncio.gather(*map(running.engine.generate, calls))
    assert len({tuple(completion.token_ids) for [completion] in found}) == len(found), "each hears something else"
    for prompt, [completion] in zip(case.prompts, found, strict=True):
        heard, begin = torch.from_numpy(prompt.features["input_features"]), torch.from_numpy(prompt.ids.astype(np.int64))
        with torch.no_grad():
            own = case.models[0].generate(heard, decoder_input_ids=begin[None], max_new_tokens=8, do_sample=False)[0].tolist()
        assert completion.token_ids.tolist() == own
        assert np.allclose(completion.logprobs, logprobs_of(case, prompt, completion), atol=1e-5)


async def test_sampled_tokens_have_transformers_log_probs_whoever_leaves_first(case, start) -> None:
    running = await start(max_slots=7, max_prefill_tokens=8)
    calls = [request(str(n), p, 4, seed=3, max_new_tokens=3 + 4 * (n % 3)) for n, p in enumerate(case.prompts)]
    for prompt, completions in zip(case.prompts, await asyncio.gather(*map(running.engine.generate, calls)), strict=True):
        for completion in completions:
            assert completion.token_ids.max() <= case.models[0].config.eos_token_id
            assert np.allclose(completion.logprobs, logprobs_of(case, prompt, completion), atol=1e-5)


async def test_a_sound_is_encoded_once_for_all_seeds_and_again_after_a_publication(case, start) -> None:
    running = await start(max_slots=2)
    omni, calls = running.engine._policy.omni, []
    encode = omni.encode
    omni.encode = lambda features: calls.append(1) or encode(features)
    prompt = case.prompts[0]
    await running.engine.generate(request("a", prompt, 5))
    assert len(calls) == 1
    gate = StepGate(running.engine, 2)  # four seeds wait for a place while weights change
    waiting = asyncio.create_task(running.engine.generate(request("b", prompt, 6, max_new_tokens=8)))
    await asyncio.to_thread(gate.reached.wait)
    await running.publish(1, 1)
    found = await waiting
    assert len(calls) == 3
    assert [segment.version for segment in found[0].versions] == [0, 1]
    assert np.allclose(found[-1].logprobs, logprobs_of(case, prompt, found[-1], 1), atol=1e-5)
    assert not running.engine._scheduler._rows.heard, "whose memory is given back"


async def test_a_completion_is_continued_elsewhere_and_its_bits_do_not_depend_on_company(case, start) -> None:
    first, second = await start(), await start(deterministic=True)
    calls = [request(str(n), prompt, 3, seed=5, max_new_tokens=6) for n, prompt in enumerate(case.prompts)]
    whole = [await second.engine.generate(call) for call in calls]
    together = await asyncio.gather(*map(second.engine.generate, calls))
    for call, one, other in zip(calls, whole, together, strict=True):
        cut = tuple(
            replace(
                c, token_ids=c.token_ids[:n], logprobs=c.logprobs[:n], versions=c.versions[: n > 0], finish=FinishReason.ABORT
            )
            for c, n in zip(one, (0, 2, 4), strict=True)
        )
        for a, b, c in zip(one, other, await first.engine.generate(replace(call, partials=cut)), strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist() == c.token_ids.tolist()
            assert a.logprobs.view(np.uint32).tolist() == b.logprobs.view(np.uint32).tolist()
            assert np.allclose(a.logprobs, c.logprobs, atol=1e-5)


async def test_requests_at_fault_are_refused_and_the_engine_goes_on(case, start) -> None:
    running, prompt = await start(), case.prompts[0]
    for call, message in (
        (replace(request("a", prompt), features={}), "no media"),
        (replace(request("e", prompt), prompt_ids=[1, 2, 3], features={}), "has no sound"),
        (replace(request("b", prompt), features={"input_features": np.zeros((1, 20, 50), np.float32)}), r"given \[1, 20, 50\]"),
        (replace(request("c", prompt), prompt_ids=list(range(128))), "the context is 128"),
    ):
        with pytest.raises(RequestError, match=message):
            await running.engine.generate(call)
    assert len(await running.engine.generate(request("d", prompt))) == 1
