"""The embedded engine sees and hears: transformers' own tokens and log-probs, media encoded once a prompt, none written."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_models import Publisher, StepGate
from omni_prompts import image, plain_inputs, plain_logprobs, prepare, sound, spread, video
from transformers import AutoModelForMultimodalLM

from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.engine import RequestError
from relax.engines.local import LocalEngine
from relax.models.processor import OmniProcessor
from relax.types import FinishReason, GenerateRequest, Sampling, VersionSegment

SEEN = {"image": (image(), "What?"), "text": ("1+1=?",), "video": (video(3), image(70, 200, 1), "?")}
HEARD = SEEN | {"sounds": (sound(0.3), "or", sound(1.0, 1), "?"), "all": (image(), sound(0.5), "?")}
FAMILIES = [
    "qwen3_vl",
    pytest.param("qwen3_omni", marks=pytest.mark.slow),
    pytest.param("qwen2_5_omni", marks=pytest.mark.slow),
]
FAMILIES += [pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)]


class OmniPublisher(Publisher):
    CANARY = (20, 9, 17, 33, 60, 2)


@pytest.fixture(scope="module")
def load(tiny_omni):
    """By family: transformers' model, prompts, tokens that stand for media. Two models of other weights."""
    found = {}

    def load(family):
        if family not in found:
            processor = OmniProcessor(tiny_omni(family))
            models = [spread(AutoModelForMultimodalLM.from_pretrained(tiny_omni(family))) for _ in range(2)]
            with torch.no_grad():
                for parameter in models[1].parameters():
                    parameter.mul_(1.1)
            contents = HEARD if "omni" in family else SEEN
            prompts = {name: prepare(processor, *content) for name, content in contents.items()}
            media_ids = sorted(processor.token_ids.values())
            cores = [getattr(model, "thinker", model) for model in models]
            found[family] = SimpleNamespace(models=models, cores=cores, prompts=prompts, media_ids=media_ids)
        return found[family]

    return load


@pytest.fixture
async def start(load, tiny_omni, tmp_path):
    publisher, engines = OmniPublisher(tmp_path), []

    async def make(family, *, deterministic=False, **config):
        model = ModelConfig(path=str(tiny_omni(family)))
        engine = LocalEngine(model, LocalEngineConfig(device="cpu", **config), deterministic=deterministic)
        engines.append(engine)

        async def publish(version, which=0):
            manifest = _banned(publisher, load(family), which, version)
            await engine.load_weights(manifest)

        await publish(0)
        return SimpleNamespace(engine=engine, publish=publish, **vars(load(family)))

    yield make
    await asyncio.gather(*(engine.close() for engine in engines))


def _banned(publisher, case, which, version):
    """A publication whose canary was computed as the trainer does: no probability on tokens of media."""
    with torch.no_grad():
        logits = case.cores[which](torch.tensor([publisher.CANARY])).logits[0, :-1].float()
    logits[:, case.media_ids] = -torch.inf
    wanted = torch.log_softmax(logits, -1).gather(-1, torch.tensor(publisher.CANARY)[1:, None])[:, 0]
    manifest = publisher(SimpleNamespaceModel(case.models[which], case.cores[which]), version)
    return replace(manifest, canary_logprobs=tuple(wanted.tolist()))


class SimpleNamespaceModel:
    """What the publisher asks of a model: the names of the whole, and the forward pass of its core."""

    def __init__(self, whole, core):
        self._whole, self._core = whole, core

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def __call__(self, ids):
        return self._core(ids)


def request(name, prompt, num=1, *, seed=0, max_new_tokens=10, **sampling):
    seeds = tuple(range(seed, seed + num))
    return GenerateRequest(
        name, prompt.ids.tolist(), seeds, Sampling(max_new_tokens=max_new_tokens, **sampling), features=prompt.features
    )


@torch.no_grad()
def own_logprobs(case, prompt, completion, which=0):
    """transformers' log-probs of the completion's tokens, with no probability on tokens of media."""
    core, ids = case.cores[which], np.concatenate([prompt.ids, completion.token_ids])
    logits = core(**plain_inputs(core, ids, prompt)).logits[0].float()
    logits[:, case.media_ids] = -torch.inf
    tokens = torch.from_numpy(completion.token_ids.astype(np.int64))
    return torch.log_softmax(logits, -1)[len(prompt.ids) - 1 : -1].gather(-1, tokens[:, None])[:, 0].numpy()


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_are_those_of_generate(start, family, deterministic) -> None:
    case = await start(family, deterministic=deterministic)
    calls = {name: request(name, prompt, temperature=0.0, max_new_tokens=6) for name, prompt in case.prompts.items()}
    found = dict(zip(calls, await asyncio.gather(*map(case.engine.generate, calls.values())), strict=True))
    core = case.cores[0]
    for name, prompt in case.prompts.items():
        [completion] = found[name]
        inputs = plain_inputs(core, prompt.ids, prompt)
        with torch.no_grad():
            own = core.generate(**inputs, max_new_tokens=6, do_sample=False, suppress_tokens=case.media_ids)
        assert completion.token_ids.tolist() == own[0, len(prompt.ids) :].tolist(), name
        assert np.allclose(completion.logprobs, own_logprobs(case, prompt, completion), atol=1e-5), name


@pytest.mark.parametrize("family", FAMILIES)
async def test_sampled_tokens_have_transformers_log_probs_and_never_stand_for_media(start, family) -> None:
    case = await start(family, max_slots=9, max_prefill_tokens=64)
    with torch.no_grad():  # tokens of media would be written more often than any other
        core = case.cores[0]
        weight = core.get_output_embeddings().weight
        before = weight.clone()
        weight[case.media_ids] = weight[case.media_ids].mean(0) + weight.std(0) * 3
    try:
        await case.publish(1)
        calls = [request(name, prompt, 4, seed=3) for name, prompt in case.prompts.items()]
        for prompt, completions in zip(
            case.prompts.values(), await asyncio.gather(*map(case.engine.generate, calls)), strict=True
        ):
            for completion in completions:
                assert not set(completion.token_ids.tolist()) & set(case.media_ids)
                assert np.allclose(completion.logprobs, own_logprobs(case, prompt, completion), atol=1e-5)
    finally:
        with torch.no_grad():
            weight.copy_(before)


async def test_a_prompts_media_are_encoded_once_for_all_seeds_and_again_after_a_publication(start) -> None:
    case = await start("qwen3_vl", max_slots=2)
    omni = case.engine._policy.omni
    calls = []
    encode = omni.encode
    omni.encode = lambda features: calls.append(1) or encode(features)
    prompt = case.prompts["image"]
    await case.engine.generate(request("a", prompt, 2))
    assert len(calls) == 1
    gate = StepGate(case.engine, 2)  # four seeds wait for a place while weights change
    running = asyncio.create_task(case.engine.generate(request("b", prompt, 6, max_new_tokens=8)))
    await asyncio.to_thread(gate.reached.wait)
    await case.publish(1, 1)
    found = await running
    assert len(calls) == 3
    assert [segment.version for segment in found[0].versions] == [0, 1]
    assert found[-1].versions == (VersionSegment(0, 1),)
    assert np.allclose(found[-1].logprobs, own_logprobs(case, prompt, found[-1], 1), atol=1e-5)


async def test_a_completion_is_continued_elsewhere(start) -> None:
    first, second = await start("qwen3_vl"), await start("qwen3_vl", deterministic=True)
    for name, prompt in first.prompts.items():
        call = request(name, prompt, 3, seed=5, max_new_tokens=6)
        whole = await first.engine.generate(call)
        cut = tuple(
            replace(
                c, token_ids=c.token_ids[:n], logprobs=c.logprobs[:n], versions=c.versions[: n > 0], finish=FinishReason.ABORT
            )
            for c, n in zip(whole, (0, 2, 4), strict=True)
        )
        for case in (first, second):
            again = await case.engine.generate(replace(call, partials=cut))
            for old, new in zip(whole, again, strict=True):
                assert new.token_ids.tolist() == old.token_ids.tolist()
                assert np.allclose(new.logprobs, old.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni"])
async def test_deterministic_bits_do_not_depend_on_company(start, family) -> None:
    case = await start(family, deterministic=True, max_slots=5)
    calls = [request(name, prompt, 3, seed=7) for name, prompt in case.prompts.items()]
    alone = [await case.engine.generate(call) for call in calls]
    together = await asyncio.gather(*(case.engine.generate(replace(call, request_id=f"{i}")) for i, call in enumerate(calls)))
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.logprobs.view(np.uint32).tolist() == b.logprobs.view(np.uint32).tolist()


async def test_requests_at_fault_are_refused_and_the_engine_goes_on(start, tiny_model, models) -> None:
    case = await start("qwen3_vl")
    prompt, text = case.prompts["image"], case.prompts["text"]
    for call, message in (
        (replace(request("a", prompt), features={}), "stand for media, and no media"),
        (replace(request("b", text), features=prompt.features), "0 tokens for images"),
        (replace(request("c", prompt), prompt_ids=[*prompt.ids, case.media_ids[0]]), "7 tokens for images, its images take 6"),
        (replace(request("d", prompt), features={"image_grid_thw": prompt.features["image_grid_thw"]}), "gives 0 embeddings"),
    ):
        with pytest.raises(RequestError, match=message):
            await case.engine.generate(call)
    assert len(await case.engine.generate(request("e", prompt))) == 1
    reader = LocalEngine(ModelConfig(path=str(tiny_model)), LocalEngineConfig(device="cpu"))
    try:
        reader._policy.version = 0  # as if it had weights: the request is refused before they are used
        with pytest.raises(RequestError, match="reads text alone"):
            await reader.generate(request("f", prompt))
    finally:
        await reader.close()


def test_log_probs_of_the_helper_are_those_of_a_plain_forward(load) -> None:
    case = load("qwen3_vl")
    prompt = case.prompts["image"]
    after = SimpleNamespace(token_ids=np.array([20, 21, 22], np.int32))
    plain = plain_logprobs(case.models[0], prompt, (20, 21, 22))[-3:].detach().numpy()
    assert (own_logprobs(case, prompt, after) >= plain - 1e-6).all()
