"""Packed forwards and backwards against transformers, one sample at a time, on every kind of model and path."""

import numpy as np
import pytest
import torch
from train_batches import make_batch, take
from transformers import AutoModelForCausalLM

from relax.train import attention
from relax.train.torch_backend import TorchBackend

PATHS = [
    ("qwen3", True),
    ("qwen3", False),
    ("llama", True),
    ("llama", False),
    ("qwen3_moe", True),
]
every_path = pytest.mark.parametrize(("name", "fused"), PATHS)


def make_backend(make_run, name, fused, *overrides):
    return TorchBackend(make_run(name, f"train.backend.use_fused_forward={str(fused).lower()}", *overrides))


def plain_logprobs(model, batch, temperature):
    """A list of `[T]` tensors with a graph: log-probs by transformers, of each sample alone and unpadded."""
    rows = []
    for row in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[row].astype(np.int64))
        logits = model(input_ids=tokens[None]).logits[0] / temperature
        found = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        rows.append(torch.cat((found.new_zeros(1), found)))
    return rows


def plain_gradients(folder, batch):
    """Gradients of the un-normalised clipped objective on transformers' own forward, in a plain loop over samples."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = torch.zeros(())
    for row, logprobs in enumerate(plain_logprobs(model, batch, 1.0)):
        keep = torch.from_numpy(batch.loss_mask[row]) != 0
        advantages = torch.from_numpy(batch.advantages[row])[keep]
        ratio = (logprobs[keep] - torch.from_numpy(batch.rollout_logprobs[row])[keep]).exp()
        total = total - torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(backend, *batches):
    """Sums over `batches`, by name."""
    for batch in batches:
        backend.forward_backward(batch)
    return {name: g.clone() for name, g in backend.gradients().items()}


def assert_same(found, wanted, tolerance=2e-5):
    assert found.keys() >= wanted.keys()
    for name, gradient in wanted.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        assert ((found[name] - gradient).abs().max() / scale) < tolerance, name


@every_path
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_separate_forwards(make_run, model_folder, name, fused, temperature):
    batch = make_batch()
    found = make_backend(make_run, name, fused, f"rollout.temperature={temperature}").logprobs(batch)
    model = AutoModelForCausalLM.from_pretrained(model_folder(name))
    with torch.no_grad():
        for row, wanted in enumerate(plain_logprobs(model, batch, temperature)):
            assert np.allclose(found[row], np.where(batch.loss_mask[row], wanted, 0), atol=1e-5)


@every_path
def test_gradients_equal_separate_forwards(make_run, model_folder, name, fused):
    batch = make_batch()
    assert_same(gradients(make_backend(make_run, name, fused), batch), plain_gradients(model_folder(name), batch))


@every_path
def test_gradients_are_the_same_for_any_micro_batches_and_any_stream_of_groups(make_run, name, fused):
    batch = make_batch()
    wanted = gradients(make_backend(make_run, name, fused), batch)
    tiny = make_backend(make_run, name, fused, "train.max_tokens_per_micro_batch=25", "train.logprob_chunk=5")
    assert_same(gradients(tiny, batch), wanted)
    ids = batch.group_ids
    streamed = [take(batch, np.flatnonzero(ids == group)) for group in np.unique(ids)[::-1]]
    assert_same(gradients(make_backend(make_run, name, fused), *streamed), wanted)
    alone = [take(batch, [row]) for row in range(len(batch))]  # nothing shared
    assert_same(gradients(make_backend(make_run, name, fused), *alone), wanted)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_long_rows_take_the_other_attention_and_agree(make_run, model_folder, name, monkeypatch):
    monkeypatch.setattr(attention, "_DENSE_LIMIT", 0)
    batch = make_batch(sizes=(3, 1, 2), longest=60, prompts=(1, 30))
    assert_same(gradients(make_backend(make_run, name, True), batch), plain_gradients(model_folder(name), batch))


def test_rows_of_very_different_lengths(make_run, model_folder):
    batch = make_batch(sizes=(5, 5, 1), longest=120, prompts=(1, 40), seed=4)
    assert_same(gradients(make_backend(make_run, "qwen3", True), batch), plain_gradients(model_folder("qwen3"), batch))


def test_a_sample_never_changes_another(make_run):
    """Every token of one sample is replaced; the log-probs of the others stay."""
    backend, batch = TorchBackend(make_run("qwen3")), make_batch()
    row = int(np.argmax(np.diff(batch.tokens.offsets)))
    before = backend.logprobs(batch)
    trained = batch.loss_mask[row] != 0
    batch.tokens[row][trained] = 3 + (batch.tokens[row][trained] + 11) % 200
    after = backend.logprobs(batch)
    for other in range(len(batch)):
        same = np.allclose(before[other], after[other], atol=1e-5)
        assert same == (other != row)


def test_the_ratio_is_one_on_policy_at_another_temperature(make_run, model_folder):
    """Behaviour log-probs from an independent forward at temperature 0.6: the trainer must find its own policy in them."""
    batch = make_batch()
    model = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"))
    with torch.no_grad():
        for row, values in enumerate(plain_logprobs(model, batch, 0.6)):
            batch.rollout_logprobs[row][:] = values
    values = TorchBackend(make_run("qwen3", "rollout.temperature=0.6")).forward_backward(batch).values()
    assert values["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert values["rollout_train_logprob_diff/max"] < 1e-5
    assert values["ess"] == pytest.approx(1.0, abs=1e-6)
