"""Models that say numbers see and hear: values and gradients are transformers' own in float64, for each sample alone."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omni_prompts import plain_inputs, prepare, spread
from test_omni_backend import FAMILIES, HEARD, SEEN, make_batch
from transformers import AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq, AutoProcessor

from relax.algorithms.scalar_losses import SquaredError
from relax.models.folder import read_model_folder
from relax.models.processor import OmniProcessor
from relax.models.tiny_whisper import build_tiny_whisper
from relax.train.backend import TrainBatch
from relax.train.critic_backend import CriticBackend
from relax.train.scalar_backend import ScalarBackend
from relax.types import Ragged


@pytest.fixture(scope="module")
def load(tiny_omni, tmp_path_factory):
    """By family: a folder whose weights make what is seen matter, its model in float64, and groups of two samples."""
    found = {}

    def load(family):
        if family not in found:
            folder = tmp_path_factory.mktemp("critic") / family
            model = spread(AutoModelForMultimodalLM.from_pretrained(tiny_omni(family)))
            model.save_pretrained(folder)
            AutoProcessor.from_pretrained(tiny_omni(family)).save_pretrained(folder)
            processor = OmniProcessor(folder)
            prompts = [prepare(processor, *content) for content in (HEARD if "omni" in family else SEEN)]
            batch = make_batch(prompts)
            model.double().set_experts_implementation("eager")  # grouped products are not for float64
            found[family] = SimpleNamespace(
                folder=folder,
                model=model,
                core=getattr(model, "thinker", model),
                prompts=prompts,
                batch=replace(batch, returns=batch.advantages, advantages=None),
            )
        return found[family]

    return load


@pytest.fixture
def start(load, make_run):
    def make(family, *overrides, loss=None, head="token"):
        words = (f"model.path={load(family).folder}", "train.lr=1e-2", "train.backend.device=cpu", *overrides)
        backend = ScalarBackend(make_run("qwen3", *words), loss or SquaredError(), head)
        torch.manual_seed(0)
        with torch.no_grad():
            backend.model.score.weight.normal_()
        return backend

    return make


def own_values(case, row, score):
    """Of the places before a sample's trained tokens."""
    batch = case.batch
    prompt = case.prompts[batch.group_ids[row] // 10]
    out = case.core(**plain_inputs(case.core, batch.tokens[row], prompt), output_hidden_states=True)
    return (out.hidden_states[-1][0] @ score.double()[0])[np.flatnonzero(batch.loss_mask[row]) - 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [4096, pytest.param(20, marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_each_sample_alone(load, start, family, tokens) -> None:
    """All in one micro-batch, or each sample with its prompt by itself."""
    case = load(family)
    batch, score = case.batch, start(family).model.score.weight.detach()
    wanted = [own_values(case, row, score) for row in range(len(batch))]
    targets = [torch.from_numpy(batch.returns[row][batch.loss_mask[row] == 1]).double() for row in range(len(batch))]
    case.model.zero_grad()
    sum((values - target).square().sum() for values, target in zip(wanted, targets, strict=True)).backward()
    expected = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None and "lm_head" not in name}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert any("visual" in name and gradient.any() for name, gradient in expected.items())
    backend = start(family, f"train.max_tokens_per_micro_batch={tokens}")
    found = backend.values(batch)
    for row, values in enumerate(wanted):
        assert np.allclose(found[row][batch.loss_mask[row] == 1], values.detach(), rtol=1e-4, atol=1e-4)
    backend.forward_backward(batch)
    gradients = dict(backend.gradients())
    assert gradients.pop("score.weight").any()
    assert gradients.pop("score.bias").any()
    assert set(gradients) >= set(expected)
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).abs().max())
        assert error <= 1e-4 * float(gradient.abs().max()) + 1e-6 * largest, name


@pytest.mark.slow
def test_values_of_what_is_heard_by_whisper(make_run, tmp_path) -> None:
    build_tiny_whisper(tmp_path)
    backend = ScalarBackend(make_run("qwen3", f"model.path={tmp_path}"), SquaredError())
    with torch.no_grad():
        backend.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    rng = np.random.default_rng(0)
    sounds = {10: rng.normal(size=(1, 20, 200)).astype(np.float32), 20: rng.normal(size=(1, 20, 200)).astype(np.float32)}
    rows = [np.r_[[258, 259], rng.integers(20, 200, length)].astype(np.int32) for length in (5, 3, 6, 4)]
    masks = [(np.arange(len(row)) >= 2).astype(np.uint8) for row in rows]
    tokens, features = Ragged.pack(rows), {group: {"input_features": sound} for group, sound in sounds.items()}
    returns = Ragged(rng.normal(size=len(tokens.values)).astype(np.float32), tokens.offsets)
    groups = np.array([10, 10, 20, 20])
    batch = TrainBatch(tokens, Ragged.pack(masks), groups, returns=returns, features=features)
    found, model = backend.values(batch), AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path).double().eval()
    for row, (ids, group) in enumerate(zip(rows, groups, strict=True)):
        given = {
            "input_features": torch.from_numpy(sounds[group]).double(),
            "decoder_input_ids": torch.from_numpy(ids)[None].long(),
        }
        with torch.no_grad():
            hidden = model.model(**given).last_hidden_state[0]
        expected = hidden[1:-1] @ backend.model.score.weight.detach().double()[0]
        assert np.allclose(found[row][2:], expected, rtol=1e-4, atol=1e-4)
    backend.forward_backward(batch)
    assert any("encoder" in name and gradient.any() for name, gradient in backend.gradients().items())


def test_what_is_seen_makes_a_difference_and_a_new_critic_expects_nothing(load, start, make_run) -> None:
    case, backend = load("qwen3_vl"), start("qwen3_vl")
    blank = {group: {n: a * 0 if "pixel" in n else a for n, a in seen.items()} for group, seen in case.batch.features.items()}
    found, unseen = backend.values(case.batch), backend.values(replace(case.batch, features=blank))
    assert np.abs(found[0] - unseen[0]).max() > 0.1
    assert np.array_equal(found[2], unseen[2]), "a prompt of text"
    fresh = CriticBackend(make_run("qwen3", "algorithm.type=ppo", f"model.path={case.folder}"))
    assert not fresh.values(case.batch).values.any()


@pytest.mark.parametrize("head", ["token", "sequence"])
def test_an_exported_folder_says_the_same_and_has_no_vocabulary_head(load, start, make_run, tmp_path, head) -> None:
    case, backend = load("qwen3_vl"), start("qwen3_vl", head=head)
    backend.forward_backward(case.batch)
    assert backend.finish_step()["skipped"] == 0
    backend.export(tmp_path / "out")
    again = ScalarBackend(make_run("qwen3", f"model.path={tmp_path / 'out'}"), SquaredError(), head)
    assert np.array_equal(again.values(case.batch).values, backend.values(case.batch).values)
    assert "lm_head.weight" not in again.weights()
    assert read_model_folder(again._config.model).media == ("image", "video")
    assert again.model.config.architectures == [f"Qwen3VLFor{head.title()}Classification"]
    assert prepare(OmniProcessor(tmp_path / "out"), *SEEN[0]).ids.tolist() == case.prompts[0].ids.tolist()


def test_frozen_encoders_stay_and_patterns_that_are_of_the_policy_alone_are_left_out(load, start) -> None:
    backend = start("qwen3_vl", 'train.freeze=["visual.*", "lm_head.*"]')
    before = {name: tensor.clone() for name, tensor in backend.weights().items()}
    backend.forward_backward(load("qwen3_vl").batch)
    backend.finish_step()
    same = {name for name, tensor in backend.weights().items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if ".visual." in name}
