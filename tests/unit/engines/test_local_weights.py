"""A version is used only when names, shapes, types, content and canary agree; else the engine goes on with the one it has."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import build, request, true_logprobs

from relax.errors import EngineError, WeightSyncError

PROMPT = [3, 4, 5, 6]


async def answer(engine, name="a", seed=0):
    return [c.token_ids.tolist() for c in await engine.generate(request(name, PROMPT, 4, seed=seed))]


async def test_without_weights_nothing_is_generated(start):
    engine = await start(load=False)
    assert (await engine.stats()).version == -1
    with pytest.raises(EngineError, match="no weights loaded"):
        await engine.generate(request("a", PROMPT))


def renamed(weights):
    first = next(iter(weights))
    weights["model.not_there.weight"] = weights.pop(first)


def cut(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]


def halved(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()


def doubled(weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def other_values(weights):
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = -weights[name]


def not_a_number(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"] * torch.nan


BAD = {
    renamed: r"1 missing: 'model.embed_tokens.weight'.*1 left over: 'model.not_there.weight'",
    cut: r"model.norm.weight is float32 \[31\].*expects float32 \[32\]",
    halved: r"model.norm.weight is bfloat16",
    doubled: r"left over: 'lm_head.weight'",
    other_values: r"canary's log-prob differs by .*goes on with version 0",
    not_a_number: r"canary's log-prob differs by nan",
}


@pytest.mark.parametrize("use_fused", [True, False])
@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
async def test_a_bad_version_is_refused_and_changes_nothing(spoil, use_fused, start, publish):
    engine = await start(use_fused_forward=use_fused)
    before = await answer(engine)
    newer = build("qwen3", seed=1)
    weights = {name: p.detach().clone() for name, p in newer.named_parameters()}
    spoil(weights)
    with pytest.raises(WeightSyncError, match=BAD[spoil]):
        await engine.load_weights(publish(newer, 1, weights=weights))
    assert (await engine.stats()).version == 0
    assert await answer(engine) == before
    await engine.load_weights(publish(newer, 1))  # and the right one is taken
    assert (await engine.stats()).version == 1
    assert await answer(engine) != before


@pytest.mark.parametrize(("num_far", "is_taken"), [(1, True), (2, False)])
async def test_rounding_at_one_token_is_no_other_model(num_far, is_taken, start, publish):
    engine, manifest = await start(), publish(build("qwen3", seed=1), 1)
    far = [value + (3e-4 if place < num_far else 0.0) for place, value in enumerate(manifest.canary_logprobs)]
    manifest = replace(manifest, canary_logprobs=tuple(far))
    if is_taken:
        assert await engine.load_weights(manifest) < 1e-5
    else:
        with pytest.raises(WeightSyncError, match=r"canary's log-prob differs by 0\.0003"):
            await engine.load_weights(manifest)


def overwrite(location, content):
    Path(location).write_bytes(content)


def flip_a_bit(location):
    content = bytearray(Path(location).read_bytes())
    content[100] ^= 1
    overwrite(location, content)


async def test_changed_bytes_are_refused(start, publish):
    engine = await start()
    manifest = publish(build("qwen3", seed=1), 1)
    flip_a_bit(manifest.location)
    with pytest.raises(WeightSyncError, match="digest"):
        await engine.load_weights(manifest)


@pytest.mark.parametrize("change", [{"canary_tokens": (), "canary_logprobs": ()}, {"canary_tokens": (5, 9, 17, 33, 60, 2000)}])
async def test_a_canary_that_proves_nothing_is_refused(change, start, publish, models):
    engine = await start()
    with pytest.raises(WeightSyncError, match="canary"):
        await engine.load_weights(replace(publish(models("qwen3").model, 1), **change))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
async def test_the_same_weights_again_change_nothing(kind, start, publish, models):
    engine = await start(kind)
    before = await answer(engine)
    for version in (0, 1):
        assert await engine.load_weights(publish(models(kind).model, version)) < 1e-5
        assert await answer(engine) == before


async def test_weights_are_copied(start, publish, models):
    """What the publisher does to its file afterwards does not reach the engine."""
    engine = await start(load=False)
    manifest = publish(models("qwen3").model, 0)
    await engine.load_weights(manifest)
    before = await answer(engine)
    overwrite(manifest.location, bytes(manifest.num_bytes))
    assert await answer(engine) == before


async def test_versions_are_taken_in_the_order_of_the_calls(start, publish):
    engine = await start()
    manifests = [publish(build("qwen3", seed=version), version) for version in range(1, 5)]
    await asyncio.gather(*(engine.load_weights(manifest) for manifest in manifests))
    assert (await engine.stats()).version == 4


async def test_a_running_request_survives_a_refused_version(start, publish):
    engine = await start()
    wanted = await answer(engine)
    newer = build("qwen3", seed=1)
    weights = {name: p.detach() for name, p in newer.named_parameters()}
    other_values(weights)
    bad = publish(newer, 1, weights=weights)
    results = await asyncio.gather(answer(engine, "b"), engine.load_weights(bad), return_exceptions=True)
    assert results[0] == wanted
    assert isinstance(results[1], WeightSyncError)


async def test_a_tied_head_and_persistent_buffers_are_part_of_a_version(start, publish):
    """The buffer says which experts a token goes to: without it the log-probs are others."""
    engine, first = await start("glm4_moe"), build("glm4_moe")
    before = await answer(engine)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    manifest = publish(first, 1)
    assert name in manifest.tensors
    assert "lm_head.weight" not in manifest.tensors
    first.get_buffer(name).neg_()
    await engine.load_weights(publish(first, 2))
    completions = await engine.generate(request("b", PROMPT, 4))
    for completion in completions:
        wanted = true_logprobs(first, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
        assert torch.allclose(torch.from_numpy(completion.logprobs), wanted, atol=1e-5)
    assert [c.token_ids.tolist() for c in completions] != before
    without = {n: p.detach() for n, p in first.named_parameters()}
    with pytest.raises(WeightSyncError, match=f"1 missing: '{name}'"):
        await engine.load_weights(publish(first, 3, weights=without))
