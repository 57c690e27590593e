"""Conversations with media in every turn: the engine goes on from what it said, and the trainer scores it as it was sampled."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omni_prompts import heard, image, messages, plain_inputs, prepare, sound, spread, video
from transformers import AutoModelForMultimodalLM, AutoProcessor

from relax.config import make_config
from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.local import LocalEngine
from relax.models.processor import OmniProcessor
from relax.train.backend import TrainBatch
from relax.train.folder_weights import load_folder
from relax.train.torch_backend import TorchBackend
from relax.types import GenerateRequest, Ragged, Sampling

SEEN = [
    [(image(), "What?"), ("and", video(3), "?"), (image(64, 64, 1), image(96, 64, 2), "?")],
    [("1+1=?",), (image(70, 200, 3), "?"), (video(2, 4.0, 4), "?")],
]
HEARD = [
    [(sound(1.2), "?"), (image(), "and", heard(), "?"), (sound(1.0, 1), "?")],
    [("Hi",), (video(3), "?"), (sound(1.1, 2), image(64, 64, 1), "?")],
]
SHORT = [[(sound(0.3), "?"), (sound(1.2, 1), "?"), (sound(0.5, 2), "?")]]  # which encoders may pad to one another
FAMILIES = ["qwen3_vl", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_omni", "qwen2_5_omni", "qwen3_vl_moe"))]


@pytest.fixture(scope="module")
def load(tiny_omni, tmp_path_factory):
    """By family: a folder whose weights make its distributions uneven, its model, and its processor."""
    found = {}

    def load(family):
        if family not in found:
            folder = tmp_path_factory.mktemp("spread") / family
            model = spread(AutoModelForMultimodalLM.from_pretrained(tiny_omni(family)))
            model.save_pretrained(folder)
            AutoProcessor.from_pretrained(tiny_omni(family)).save_pretrained(folder)
            core, processor = getattr(model, "thinker", model), OmniProcessor(folder)
            found[family] = SimpleNamespace(folder=folder, core=core, processor=processor)
        return found[family]

    return load


async def talk(engine, case, name, turns):
    """Three turns of two samples each, of which the second goes on: prompts, completions, and the last conversation's mask."""
    said, prompt, mask = [], prepare(case.processor, *turns[0]), np.zeros(0, np.uint8)
    for number in range(1, len(turns) + 1):
        mask = np.r_[mask, np.zeros(len(prompt.ids) - len(mask), np.uint8)]
        sampling = Sampling(max_new_tokens=4 + number)
        request = GenerateRequest(f"{name}{number}", prompt.ids.tolist(), (1, 2), sampling, features=prompt.features)
        completions = await engine.generate(request)
        said.append((prompt, completions))
        answer = completions[1].token_ids
        mask = np.r_[mask, np.ones(len(answer), np.uint8)]
        if number < len(turns):
            shown = [c for c in turns[number] if not isinstance(c, str)]
            following = case.processor.renderer.following(messages(*turns[number]))
            prompt = case.processor.extend(prompt, answer, following, shown)
    return said, mask


async def talk_all(case, talks, **config):
    model = ModelConfig(path=str(case.folder))
    engine = LocalEngine(model, LocalEngineConfig(device="cpu", **config))
    try:
        await load_folder(engine, model)
        return await asyncio.gather(*(talk(engine, case, f"{name}-", turns) for name, turns in enumerate(talks)))
    finally:
        await engine.close()


@torch.no_grad()
def own_logprobs(case, prompt, completion):
    """transformers' log-probs of an answer, in a pass over the whole conversation, with no probability on tokens of media."""
    ids = np.concatenate([prompt.ids, completion.token_ids])
    logits = case.core(**plain_inputs(case.core, ids, prompt)).logits[0].float()
    logits[:, list(case.processor.token_ids.values())] = -torch.inf
    tokens = torch.from_numpy(completion.token_ids.astype(np.int64))
    return torch.log_softmax(logits, -1)[len(prompt.ids) - 1 : -1].gather(-1, tokens[:, None])[:, 0].numpy()


@pytest.mark.parametrize("slots", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
async def test_the_engine_goes_on_as_transformers_would(load, family, slots) -> None:
    """All turns of several conversations at once, more of them than fit."""
    case = load(family)
    for said, _ in await talk_all(case, HEARD if "omni" in family else SEEN, max_slots=slots):
        for prompt, completions in said:
            for completion in completions:
                assert np.allclose(completion.logprobs, own_logprobs(case, prompt, completion), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_trainer_scores_every_answer_as_it_was_sampled(load, tmp_path, family) -> None:
    case = load(family)
    talks = await talk_all(case, [*HEARD, *SHORT] if "omni" in family else SEEN)
    words = [
        "run.name=t",
        f"run.dir={tmp_path}",
        f"model.path={case.folder}",
        "data.type=generator",
        "data.path=relax.data.arithmetic:addition",
        "data.size=10",
        "reward.type=exact",
        "train.num_steps=1",
        "train.backend.device=cpu",
    ]
    backend = TorchBackend(make_config({}, words), None)
    ids = [np.concatenate([said[-1][0].ids, said[-1][1][1].token_ids]) for said, _ in talks]
    batch = TrainBatch(
        Ragged.pack(ids),
        Ragged.pack([mask for _, mask in talks]),
        np.arange(len(talks)),
        features={number: said[-1][0].features for number, (said, _) in enumerate(talks)},
    )
    found = backend.logprobs(batch)
    for row, (said, mask) in enumerate(talks):
        sampled = np.concatenate([completions[1].logprobs for _, completions in said])
        assert len(said) == 3
        assert np.allclose(found[row][mask == 1], sampled, atol=1e-5), row
