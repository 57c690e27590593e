"""A Whisper is trained: log-probs and gradients of packed groups are transformers' own for each sample alone."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, WhisperForConditionalGeneration

from relax.algorithms.objective import LossSums
from relax.config import make_config
from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.local import LocalEngine
from relax.errors import ModelError
from relax.models.whisper_processor import WhisperReader
from relax.train.backend import TrainBatch
from relax.train.torch_backend import TorchBackend
from relax.types import GenerateRequest, Ragged, Sampling
from relax.weights.layout import lay_out, views
from relax.weights.manifest import make_manifest
from tests.whisper_prompts import ask, own_logprobs, uneven


def weigh(tokens) -> LossSums:
    """A sum of log-probs, each with its advantage."""
    total = (tokens.logprobs * tokens.advantages).sum()
    return LossSums(total, float(len(tokens.logprobs)), {}, {})


weigh.zero_without_advantage = weigh.entropy_gradient = False


@pytest.fixture(scope="module")
def case(tiny_omni, tmp_path_factory):
    """A folder whose weights make its distributions uneven, three prompts, and groups of two, two and one samples."""
    folder = tmp_path_factory.mktemp("spread") / "whisper"
    model = uneven(WhisperForConditionalGeneration.from_pretrained(tiny_omni("whisper")))
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(tiny_omni("whisper")).save_pretrained(folder)
    reader, rng = WhisperReader(folder), np.random.default_rng(0)
    prompts = [ask(reader, 0.3), ask(reader, 1.7, 1, before="Smith"), ask(reader, 2.0, 2)]
    groups = np.array([0, 0, 10, 10, 20])
    own = [rng.integers(0, 257, rng.integers(2, 7)) for _ in groups]
    rows = [np.concatenate([prompts[group // 10].ids, after]) for group, after in zip(groups, own, strict=True)]
    mask = [np.r_[np.zeros(len(row) - len(after)), np.ones(len(after))] for row, after in zip(rows, own, strict=True)]
    tokens = Ragged.pack([row.astype(np.int32) for row in rows])
    batch = TrainBatch(
        tokens,
        Ragged.pack([row.astype(np.uint8) for row in mask]),
        groups,
        advantages=Ragged(rng.normal(size=len(tokens.values)).astype(np.float32), tokens.offsets),
        features={10 * number: prompt.features for number, prompt in enumerate(prompts)},
    )
    return SimpleNamespace(folder=folder, model=model, prompts=prompts, own=own, batch=batch)


@pytest.fixture
def start(case, tmp_path):
    def make(*overrides):
        words = ["run.name=t", f"run.dir={tmp_path}", f"model.path={case.folder}", "reward.type=exact", "data.type=generator"]
        words += ["data.path=relax.data.arithmetic:addition", "data.size=10", "train.num_steps=10", "train.lr=1e-3"]
        return TorchBackend(make_config({}, [*words, "train.backend.device=cpu", *overrides]), weigh)

    return make


@pytest.mark.parametrize("tokens", [4096, 8])
def test_log_probs_and_gradients_are_transformers_own_whatever_the_micro_batches(case, start, tokens) -> None:
    batch, backend = case.batch, start(f"train.max_tokens_per_micro_batch={tokens}")
    prompts = [case.prompts[group // 10] for group in batch.group_ids]
    wanted = [own_logprobs(case.model, prompt, after) for prompt, after in zip(prompts, case.own, strict=True)]
    found = backend.logprobs(batch)
    for row, logprobs in enumerate(wanted):
        assert np.allclose(found[row][batch.loss_mask[row] == 1], logprobs.detach(), atol=1e-5), row
    weights = [torch.from_numpy(batch.advantages[row][batch.loss_mask[row] == 1]) for row in range(len(batch))]
    case.model.zero_grad()
    sum((logprobs * weight).sum() for logprobs, weight in zip(wanted, weights, strict=True)).backward()
    backend.forward_backward(batch)
    gradients = backend.gradients()
    for name, parameter in case.model.named_parameters():
        if parameter.grad is None:
            assert name not in gradients, name
        else:  # that of a key's weights is small beside its rounding where scores are all but equal
            assert torch.linalg.norm(parameter.grad - gradients[name]) <= 1e-4 * parameter.grad.norm() + 1e-6, name
    assert any("encoder.conv1" in name for name in gradients)


def test_what_is_heard_makes_a_difference(case, start) -> None:
    backend, batch = start(), case.batch
    other = {
        group: {"input_features": features["input_features"][:, ::-1].copy()} for group, features in batch.features.items()
    }
    trained = batch.loss_mask.values == 1
    found, changed = backend.logprobs(batch).values[trained], backend.logprobs(replace(batch, features=other)).values[trained]
    assert np.abs(found - changed).max() > 1e-2


def test_rows_without_a_sound_are_refused(case, start) -> None:
    backend, batch = start(), case.batch
    with pytest.raises(ModelError, match="no row has a sound"):
        backend.forward_backward(replace(batch, features={}))
    with pytest.raises(ModelError, match="a prompt has no sound"):
        backend.forward_backward(replace(batch, features={0: batch.features[0]}))
    short = {group: {"input_features": f["input_features"][..., :100]} for group, f in batch.features.items()}
    with pytest.raises(ModelError, match=r"one spectrogram \[1, 20, 200\], and is given \[1, 20, 100\]"):
        backend.forward_backward(replace(batch, features=short))


def test_a_frozen_encoder_stays(case, start) -> None:
    backend = start('train.freeze=["model.encoder.*"]')
    before = {name: tensor.clone() for name, tensor in backend.weights().items()}
    backend.forward_backward(case.batch)
    assert backend.finish_step()["skipped"] == 0
    same = {name for name, tensor in backend.weights().items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if ".encoder." in name}


@pytest.mark.parametrize("recomputes", ["false", "true"])
async def test_an_engine_with_published_weights_agrees(case, start, tmp_path, recomputes) -> None:
    """A step is taken, encoder included; the engine proves the version by its canary and samples what the trainer scores."""
    backend = start(f"train.backend.gradient_checkpointing={recomputes}")
    backend.forward_backward(case.batch)
    assert backend.finish_step()["skipped"] == 0
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
        answers = await asyncio.gather(
            *(
                engine.generate(GenerateRequest(str(i), p.ids.tolist(), (1, 2), sampling, features=p.features))
                for i, p in enumerate(case.prompts)
            )
        )
    finally:
        await engine.close()
    pairs = [(prompt, one) for prompt, answer in zip(case.prompts, answers, strict=True) for one in answer]
    batch = replace(
        case.batch,
        tokens=Ragged.pack([np.concatenate([prompt.ids, one.token_ids]) for prompt, one in pairs]),
        loss_mask=Ragged.pack([np.r_[prompt.ids * 0, one.token_ids * 0 + 1].astype(np.uint8) for prompt, one in pairs]),
        group_ids=np.array([0, 0, 10, 10, 20, 20]),
        advantages=None,
    )
    sampled = np.concatenate([one.logprobs for _, one in pairs])
    assert np.allclose(backend.logprobs(batch).values[batch.loss_mask.values == 1], sampled, atol=1e-5)


def test_an_exported_folder_hears_the_same(case, start, tmp_path) -> None:
    backend = start()
    backend.forward_backward(case.batch)
    backend.finish_step()
    backend.export(tmp_path / "out")
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    found, prompt = backend.logprobs(case.batch), case.prompts[2]
    with torch.no_grad():
        assert np.allclose(found[4][case.batch.loss_mask[4] == 1], own_logprobs(model, prompt, case.own[4]), atol=1e-5)
    again = ask(WhisperReader(tmp_path / "out"), 2.0, 2)
    assert again.ids.tolist() == prompt.ids.tolist()
    assert np.array_equal(again.features["input_features"], prompt.features["input_features"])
