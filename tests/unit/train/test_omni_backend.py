"""The trainer sees and hears: log-probs and gradients of packed groups are those of transformers for each sample alone."""

import asyncio
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omni_prompts import image, plain_inputs, prepare, sound, spread, video
from transformers import AutoModelForMultimodalLM, AutoProcessor

from relax.algorithms.objective import LossSums
from relax.config import make_config
from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.local import LocalEngine
from relax.errors import ConfigError, ModelError
from relax.models.processor import OmniProcessor
from relax.train.backend import TrainBatch
from relax.train.folder_weights import load_folder
from relax.train.torch_backend import TorchBackend
from relax.types import GenerateRequest, Ragged, Sampling
from relax.weights.layout import lay_out, views
from relax.weights.manifest import make_manifest

SEEN = [(image(), "What?"), ("1+1=?",), (video(3), image(70, 200, 1), "?"), (image(64, 64, 2), "and", image(seed=3), "?")]
HEARD = [(sound(0.3), "or", sound(1.0, 1), "?"), ("Hi",), (image(), sound(0.5, 2), "?"), (image(64, 64, 3), "?")]
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_omni", "qwen2_5_omni", "qwen3_vl_moe")]
FAMILIES = ["qwen3_vl", *SLOW]


def weigh(tokens) -> LossSums:
    """A sum of log-probs, each with its advantage."""
    total = (tokens.logprobs * tokens.advantages).sum()
    return LossSums(total, float(len(tokens.logprobs)), {}, {})


weigh.zero_without_advantage = weigh.entropy_gradient = False


@pytest.fixture(scope="module")
def load(tiny_omni, tmp_path_factory):
    """By family: a folder whose weights make its distributions uneven, prompts, and a batch of groups of two samples."""
    found = {}

    def load(family):
        if family not in found:
            folder = tmp_path_factory.mktemp("spread") / family
            model = spread(AutoModelForMultimodalLM.from_pretrained(tiny_omni(family)))
            model.save_pretrained(folder)
            AutoProcessor.from_pretrained(tiny_omni(family)).save_pretrained(folder)
            processor = OmniProcessor(folder)
            prompts = [prepare(processor, *content) for content in (HEARD if "omni" in family else SEEN)]
            found[family] = SimpleNamespace(
                family=family,
                folder=folder,
                model=model,
                core=getattr(model, "thinker", model),
                prompts=prompts,
                media_ids=sorted(processor.token_ids.values()),
                batch=make_batch(prompts),
            )
        return found[family]

    return load


def make_batch(prompts, size=2, seed=0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    rows, masks, groups = [], [], []
    for group, prompt in enumerate(prompts):
        for _ in range(size):
            own = rng.integers(20, 500, rng.integers(2, 7))
            rows.append(np.concatenate([prompt.ids, own]).astype(np.int32))
            masks.append(np.r_[np.zeros(len(prompt.ids)), np.ones(len(own))].astype(np.uint8))
            groups.append(group * 10)
    tokens = Ragged.pack(rows)
    advantages = Ragged(rng.normal(size=len(tokens.values)).astype(np.float32), tokens.offsets)
    features = {group * 10: prompt.features for group, prompt in enumerate(prompts)}
    return TrainBatch(tokens, Ragged.pack(masks), np.asarray(groups), advantages=advantages, features=features)


@pytest.fixture
def start(load, tmp_path):
    def make(family, *overrides, objective=weigh):
        words = [
            "run.name=t",
            f"run.dir={tmp_path}",
            f"model.path={load(family).folder}",
            "data.type=generator",
            "data.path=relax.data.arithmetic:addition",
            "data.size=10",
            "reward.type=exact",
            "train.num_steps=10",
            "train.lr=1e-3",
            "train.backend.device=cpu",
            *overrides,
        ]
        return TorchBackend(make_config({}, words), objective)

    return make


def own_logprobs(case, row):
    """transformers' log-probs of a sample's trained tokens, alone, with no probability on tokens of media."""
    batch = case.batch
    ids, trained = batch.tokens[row], np.flatnonzero(batch.loss_mask[row])
    prompt = case.prompts[batch.group_ids[row] // 10]
    logits = case.core(**plain_inputs(case.core, ids, prompt)).logits[0].float()
    logits = logits.index_fill(-1, torch.tensor(case.media_ids), -torch.inf)
    logprobs = torch.log_softmax(logits, -1)[trained - 1]
    return logprobs.gather(-1, torch.from_numpy(ids[trained].astype(np.int64))[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_transformers_own_whatever_the_micro_batches(load, start, family) -> None:
    case = load(family)
    batch, wanted = case.batch, [own_logprobs(case, row) for row in range(len(case.batch))]
    loss = sum(
        (logprobs * torch.from_numpy(batch.advantages[row][batch.loss_mask[row] == 1])).sum()
        for row, logprobs in enumerate(wanted)
    )
    case.model.zero_grad()
    loss.backward()
    for tokens in (4096, 20):  # all in one, each sample with its prompt by itself
        backend = start(family, f"train.max_tokens_per_micro_batch={tokens}")
        found = backend.logprobs(batch)
        for row, logprobs in enumerate(wanted):
            assert np.allclose(found[row][batch.loss_mask[row] == 1], logprobs.detach(), atol=1e-5), (tokens, row)
        backend.forward_backward(batch)
        gradients = backend.gradients()
        for name, parameter in case.model.named_parameters():
            own, ours = parameter.grad, gradients.get(name)
            if own is None:
                assert ours is None, name
                continue
            assert torch.linalg.norm(own - ours) <= 1e-4 * own.norm() + 1e-6, (tokens, name)
    case.model.zero_grad()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_media_reaches_the_encoders_with_zero_gradients(load, start, family) -> None:
    case, backend = load(family), start(family)
    text = make_batch([case.prompts[1]])
    backend.forward_backward(case.batch)
    with_media = set(backend.gradients())
    backend.finish_step()
    backend.forward_backward(text)
    gradients = backend.gradients()
    towers = [name for name in gradients if "visual" in name or "audio_tower" in name]
    assert set(gradients) == with_media
    assert towers
    assert all(not gradients[name].any() for name in towers)


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_engine_with_published_weights_agrees(load, start, tmp_path, family) -> None:
    """A step is taken, encoders included; the engine proves the version by its canary and samples what the trainer scores."""
    case, backend = load(family), start(family)
    before = {name: tensor.clone() for name, tensor in backend.weights().items()}
    backend.forward_backward(case.batch)
    assert backend.finish_step()["skipped"] == 0
    moved = {name for name, tensor in backend.weights().items() if not torch.equal(tensor, before[name])}
    assert any("visual" in name for name in moved)
    table, size = lay_out(backend.weights())
    content = bytearray(size)
    for name, view in views(torch.frombuffer(content, dtype=torch.uint8), table).items():
        view.copy_(backend.weights()[name])
    (tmp_path / "weights").write_bytes(content)
    manifest = make_manifest(1, memoryview(content), table, backend.canary(), location=str(tmp_path / "weights"))
    engine = LocalEngine(ModelConfig(path=str(case.folder)), LocalEngineConfig(device="cpu"))
    try:
        assert await engine.load_weights(manifest) < 1e-5
        sampling = Sampling(max_new_tokens=6)
        requests = [
            GenerateRequest(str(i), tuple(p.ids.tolist()), (1, 2), sampling, features=p.features)
            for i, p in enumerate(case.prompts)
        ]
        answers = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    rows, masks, sampled = [], [], []
    for prompt, completions in zip(case.prompts, answers, strict=True):
        for completion in completions:
            rows.append(np.concatenate([prompt.ids, completion.token_ids]))
            masks.append(np.r_[np.zeros(len(prompt.ids)), np.ones(len(completion.token_ids))].astype(np.uint8))
            sampled.append(completion.logprobs)
    batch = replace(case.batch, tokens=Ragged.pack(rows), loss_mask=Ragged.pack(masks), advantages=None)
    assert np.allclose(backend.logprobs(batch).values[batch.loss_mask.values == 1], np.concatenate(sampled), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_engine_takes_a_folder_that_sees(load, family) -> None:
    model = ModelConfig(path=str(load(family).folder))
    engine = LocalEngine(model, LocalEngineConfig(device="cpu"))
    try:
        await load_folder(engine, model)
        assert (await engine.stats()).version == 0
    finally:
        await engine.close()


def test_frozen_weights_stay_and_a_pattern_without_a_weight_is_refused(load, start) -> None:
    backend = start("qwen3_vl", 'train.freeze=["visual.*", "layers.0.mlp.*"]')
    before = {name: tensor.clone() for name, tensor in backend.weights().items()}
    backend.forward_backward(load("qwen3_vl").batch)
    backend.finish_step()
    same = {name for name, tensor in backend.weights().items() if torch.equal(tensor, before[name])}
    frozen = {name for name in before if ".visual." in name or "language_model.layers.0.mlp." in name}
    assert same == frozen
    with pytest.raises(ConfigError, match=r"'vision\.\*' matches no weight"):
        start("qwen3_vl", 'train.freeze=["vision.*"]')
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        start("qwen3_vl", 'train.freeze=["*"]')


@pytest.mark.slow
def test_an_exported_folder_sees_the_same(load, start, tmp_path) -> None:
    case, backend = load("qwen3_vl"), start("qwen3_vl")
    backend.forward_backward(case.batch)
    backend.finish_step()
    backend.export(tmp_path / "out")
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path / "out").eval()
    exported = SimpleNamespace(**{**vars(case), "core": model})
    found = backend.logprobs(case.batch)
    for row in range(0, len(case.batch), 2):  # one of each group
        mask = case.batch.loss_mask[row] == 1
        with torch.no_grad():
            assert np.allclose(found[row][mask], own_logprobs(exported, row), atol=1e-5)
    assert prepare(OmniProcessor(tmp_path / "out"), *SEEN[0]).ids.tolist() == case.prompts[0].ids.tolist()


@pytest.mark.slow
def test_of_a_model_that_speaks_the_thinker_is_loaded(tiny_omni, start, load, tmp_path) -> None:
    folder = tmp_path / "speaks"
    shutil.copytree(tiny_omni("qwen3_omni"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"enable_audio_output": True}))
    backend = start("qwen3_omni", f"model.path={folder}")
    assert all(name.startswith("thinker.") for name in backend.weights())
    assert np.isfinite(backend.logprobs(load("qwen3_omni").batch).values).all()


@pytest.mark.parametrize("is_last_trained", [True, False])
def test_a_sample_alone_may_have_media_after_tokens_that_are_trained(load, start, is_last_trained) -> None:
    """As a conversation for supervised training has them, of which the last answer may be context."""
    case, backend = load("qwen3_vl"), start("qwen3_vl")
    first, second = case.prompts[0], case.prompts[2]
    names = {*first.features, *second.features}
    features = {n: np.concatenate([p.features[n] for p in (first, second) if n in p.features]) for n in names}
    ids = np.r_[first.ids, [30, 31, 32], second.ids, [40, 41]].astype(np.int32)
    trained = [len(first.ids), len(first.ids) + 1, *([len(ids) - 2, len(ids) - 1] if is_last_trained else [])]
    mask = np.isin(np.arange(len(ids)), trained).astype(np.uint8)
    whole = SimpleNamespace(ids=ids, features=features)
    batch = TrainBatch(Ragged.pack([ids]), Ragged.pack([mask]), np.zeros(1, np.int64), features={0: features})
    talk = SimpleNamespace(core=case.core, media_ids=case.media_ids, batch=batch, prompts=[whole])
    with torch.no_grad():
        assert np.allclose(backend.logprobs(batch)[0][mask == 1], own_logprobs(talk, 0), atol=1e-5)


def test_media_that_do_not_fit_their_prompt_are_an_error(load, start) -> None:
    case, backend = load("qwen3_vl"), start("qwen3_vl")
    with pytest.raises(ModelError, match="tokens stand for"):
        backend.logprobs(replace(case.batch, features={}))
    with pytest.raises(ModelError, match="0 tokens for images"):
        backend.logprobs(replace(case.batch, features=case.batch.features | {10: case.prompts[0].features}))


def test_an_image_counts_in_the_budget_by_what_its_encoder_does(load, start) -> None:
    """4 groups of 22 to 66 tokens fit one pass; with what their images cost they do not."""
    case = load("qwen3_vl")
    tokens = sum(len(prompt.ids) + 12 for prompt in case.prompts)
    backend = start("qwen3_vl", f"train.max_tokens_per_micro_batch={tokens}")
    passes = []
    whole = backend._hidden
    backend._hidden = lambda batch, micro: passes.append(len(micro.ids)) or whole(batch, micro)
    backend.logprobs(replace(case.batch, advantages=None))
    seen, passes[:] = list(passes), []
    backend._row_costs = {}
    backend.logprobs(case.batch)
    assert len(passes) == 1 < len(seen)
    assert sum(seen) == sum(passes), "no group was divided"
