"""One optimizer step and what surrounds it: counts, skips, masked values, resume, export."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from train_batches import make_batch, take
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax.errors import CheckpointError, ModelError
from relax.train.torch_backend import TorchBackend
from relax.types import Ragged

NAMES = ("qwen3", "llama", "qwen3_moe")
COLUMNS = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")


def copies(backend):
    return {name: tensor.clone() for name, tensor in backend.weights().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def step(backend, *batches):
    for batch in batches:
        backend.forward_backward(batch)
    return backend.finish_step()


def test_a_step_moves_the_weights_and_reports(make_run):
    backend = TorchBackend(make_run("qwen3", "train.warmup_steps=4"))
    before = copies(backend)
    finished = step(backend, make_batch())
    assert finished["skipped"] == 0.0
    assert finished["grad_norm"] > 0
    assert finished["lr"] == pytest.approx(1e-2 / 4)
    assert not any(torch.equal(before[name], tensor) for name, tensor in backend.weights().items())


def test_values_at_masked_positions_do_not_matter(make_run):
    batch = make_batch()
    wanted = TorchBackend(make_run("qwen3", "algorithm.kl.coef=0.1"))
    expected = wanted.forward_backward(batch).values()
    masked = batch.loss_mask.values == 0
    changed = {}
    for name, bad in zip(COLUMNS, (np.nan, np.inf, -np.inf, np.nan), strict=True):
        column = getattr(batch, name)
        changed[name] = Ragged(np.where(masked, np.float32(bad), column.values), column.offsets)
    found = TorchBackend(make_run("qwen3", "algorithm.kl.coef=0.1"))
    assert found.forward_backward(replace(batch, **changed)).values() == expected
    assert same(dict(found.gradients()), dict(wanted.gradients()))


def test_a_batch_without_trained_tokens_changes_nothing_but_the_schedule(make_run):
    backend = TorchBackend(make_run("qwen3", "train.schedule=linear"))
    step(backend, make_batch(seed=1))  # moments that would move the weights if the optimizer ran
    before, batch = copies(backend), make_batch()
    masked = replace(batch, loss_mask=Ragged(np.zeros_like(batch.loss_mask.values), batch.loss_mask.offsets))
    assert backend.forward_backward(masked).values() == {}
    finished = backend.finish_step()
    assert (finished["grad_norm"], finished["skipped"]) == (0.0, 0.0)
    assert same(copies(backend), before)
    assert backend.finish_step()["lr"] < finished["lr"]


def test_a_model_of_text_is_given_no_media(make_run):
    batch = make_batch()
    features = {int(batch.group_ids[0]): {"pixel_values": np.zeros((4, 8), np.float32)}}
    with pytest.raises(ModelError, match="reads text alone"):
        TorchBackend(make_run("qwen3")).forward_backward(replace(batch, features=features))


def test_masking_a_sample_equals_leaving_it_out(make_run):
    batch = make_batch()
    rows = list(range(len(batch)))
    for row in (2, 5):
        batch.loss_mask[row][:] = 0
        rows.remove(row)
    with_masked, without = TorchBackend(make_run("qwen3")), TorchBackend(make_run("qwen3"))
    assert with_masked.forward_backward(batch).values() == without.forward_backward(take(batch, rows)).values()
    assert with_masked.finish_step() == without.finish_step()
    assert same(copies(with_masked), copies(without))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_thrown_away_and_said(make_run, bad):
    backend, batch = TorchBackend(make_run("qwen3")), make_batch()
    before = copies(backend)
    batch.advantages.values[batch.loss_mask.values != 0] = bad
    finished = step(backend, batch)
    assert finished["skipped"] == 1.0
    assert not math.isfinite(finished["grad_norm"])
    assert same(copies(backend), before)
    assert step(backend, make_batch())["skipped"] == 0.0
    assert all(torch.isfinite(tensor).all() for tensor in backend.weights().values())


@pytest.mark.parametrize("overrides", [(), ("algorithm.aggregation=sequence_mean",), ("algorithm.type=dr_grpo",)])
def test_metrics_and_gradient_norm_do_not_depend_on_micro_batches(make_run, overrides):
    batch = make_batch()
    options = ("algorithm.kl.coef=0.2", "algorithm.entropy_coef=0.1")
    whole = TorchBackend(make_run("qwen3", *options, *overrides))
    parts = TorchBackend(make_run("qwen3", "train.max_tokens_per_micro_batch=20", *options, *overrides))
    assert parts.forward_backward(batch).values() == pytest.approx(whole.forward_backward(batch).values(), rel=1e-4, abs=1e-6)
    assert parts.finish_step()["grad_norm"] == pytest.approx(whole.finish_step()["grad_norm"], rel=1e-4)


def test_every_metric_is_there(make_run):
    wanted = {
        "loss", "pg_loss", "kl", "entropy", "clip_fraction", "clip_fraction/low", "clip_fraction/high", "ratio/mean",
        "ratio/max", "advantage/mean", "advantage/std", "rollout_train_logprob_diff/mean", "rollout_train_logprob_diff/max",
        "rollout_train_kl", "ess",
    }  # fmt: skip
    values = TorchBackend(make_run("qwen3")).forward_backward(make_batch()).values()
    assert wanted <= set(values)
    assert not [name for name in values if "square" in name]


def test_groups_without_signal_count_but_need_no_backward_pass(make_run, monkeypatch):
    """Same metrics, same gradient, same weights as with a backward pass through everything."""
    batch = make_batch(sizes=(4, 4, 3))
    for row in np.flatnonzero(batch.group_ids == 7):
        batch.advantages[row][:] = 0
    short, full = TorchBackend(make_run("qwen3")), TorchBackend(make_run("qwen3"))
    monkeypatch.setattr(full._objective, "zero_without_advantage", False)
    calls = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda loss: (calls.append(1), backward(loss)))
    wanted = full.forward_backward(batch).values()
    assert short.forward_backward(batch).values() == pytest.approx(wanted, rel=1e-5)
    assert len(calls) == 2
    silent = take(batch, np.flatnonzero(batch.group_ids == 7))
    short.forward_backward(silent)
    assert len(calls) == 2
    full.forward_backward(silent)
    assert short.finish_step()["grad_norm"] == pytest.approx(full.finish_step()["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_recomputing_activations_changes_no_gradient(make_run, name):
    plain, recomputing = (
        TorchBackend(make_run(name, f"train.backend.gradient_checkpointing={on}")) for on in ("false", "true")
    )
    batch, calls = make_batch(), []
    recomputing.model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    for backend in (plain, recomputing):
        backend.forward_backward(batch)
    wanted = plain.gradients()
    assert len(calls) == 2
    for name, gradient in recomputing.gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=2e-5 * float(wanted[name].abs().max()) + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_resume_continues_bit_for_bit(make_run, tmp_path, name):
    options = ("train.schedule=cosine", "train.warmup_steps=2", "train.weight_decay=0.1")
    batches = [make_batch(seed=seed) for seed in range(5)]
    straight = TorchBackend(make_run(name, *options))
    first = TorchBackend(make_run(name, *options))
    finished = [step(straight, batch) for batch in batches]
    for batch in batches[:2]:
        step(first, batch)
    first.save(tmp_path / "here")
    torch.manual_seed(99)
    resumed = TorchBackend(make_run(name, *options))
    resumed.load(tmp_path / "here")
    assert [step(resumed, batch) for batch in batches[2:]] == finished[2:]
    assert same(copies(resumed), copies(straight))


def test_resume_restores_the_random_state(make_run, tmp_path):
    backend = TorchBackend(make_run("qwen3"))
    torch.manual_seed(5)
    backend.save(tmp_path)
    wanted = torch.rand(3)
    torch.manual_seed(6)
    backend.load(tmp_path)
    assert torch.equal(torch.rand(3), wanted)


def test_a_checkpoint_of_another_model_or_of_nothing_is_refused(make_run, tmp_path):
    TorchBackend(make_run("llama")).save(tmp_path / "llama")
    backend = TorchBackend(make_run("qwen3"))
    for folder, message in ((tmp_path / "llama", "not those of model.path"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(CheckpointError, match=message):
            backend.load(folder)


def test_a_full_disk_while_saving_is_a_checkpoint_error(make_run, tmp_path, monkeypatch):
    def full(*args, **options):
        raise RuntimeError("PytorchStreamWriter failed writing file data/7: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="cannot be written"):
        TorchBackend(make_run("qwen3")).save(tmp_path)


def test_bfloat16_steps_on_float32_masters(make_run, tmp_path):
    """At this learning rate a single step is below half a bfloat16 unit: without masters the weights would never move."""
    options = ("model.dtype=bfloat16", "train.lr=2e-5")
    backend, batches = TorchBackend(make_run("qwen3", *options)), [make_batch(sizes=(2, 2), seed=seed) for seed in range(30)]
    before = copies(backend)
    for batch in batches[:20]:
        step(backend, batch)
    backend.save(tmp_path)
    for batch in batches[20:]:
        step(backend, batch)
    after = copies(backend)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert sum(int((before[name] != after[name]).sum()) for name in after) > 1000
    resumed = TorchBackend(make_run("qwen3", *options))
    resumed.load(tmp_path)
    for batch in batches[20:]:
        step(resumed, batch)
    assert same(copies(resumed), after)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_model_tied_once(make_run, model_folder, name):
    backend = TorchBackend(make_run(name))
    model = AutoModelForCausalLM.from_pretrained(model_folder(name))
    wanted = dict(model.named_parameters())  # named_parameters lists a tied tensor once
    assert backend.weights().keys() == wanted.keys()
    assert same(copies(backend), {name: p.detach() for name, p in wanted.items()})


@pytest.mark.parametrize("name", NAMES)
def test_an_export_loads_and_computes_the_same(make_run, tmp_path, name):
    backend = TorchBackend(make_run(name))
    step(backend, make_batch())
    backend.export(tmp_path)
    tokens, logprobs = backend.canary()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    found = found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert np.allclose(found, logprobs, atol=1e-5)
    assert tokenizer.decode(tokenizer("7+8=15")["input_ids"]) == "7+8=15"
    assert (tmp_path / "generation_config.json").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_tokens_stand_at_each_trained_place(make_run, name):
    run = make_run(name, "rollout.temperature=0.7", "train.max_tokens_per_micro_batch=40")
    backend, batch = TorchBackend(run), make_batch()
    model = AutoModelForCausalLM.from_pretrained(run.model.path)
    ids, logprobs = backend.top_logprobs(batch, 4, 250)
    assert (ids.values.dtype, logprobs.values.dtype) == (np.int32, np.float32)
    for row in range(len(batch)):
        with torch.no_grad():
            logits = model(torch.from_numpy(batch.tokens[row].astype(np.int64))[None]).logits[0]
        wanted = (logits / 0.7).log_softmax(-1)[:, :250].topk(4, -1)
        trained = np.flatnonzero(batch.loss_mask[row])
        assert np.allclose(logprobs[row][trained], wanted.values[trained - 1], rtol=1e-4, atol=1e-4)
        assert (ids[row][trained] == wanted.indices[trained - 1].numpy()).mean() > 0.9, "but for near ties"
        assert not ids[row][batch.loss_mask[row] == 0].any()
        assert not logprobs[row][batch.loss_mask[row] == 0].any()


def test_the_canary_is_at_temperature_one_and_fixed(make_run):
    cold, warm = TorchBackend(make_run("qwen3", "rollout.temperature=0.5")), TorchBackend(make_run("qwen3"))
    assert cold.canary() == warm.canary()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: [p.unlink() for p in folder.glob("tokenizer*")], "no tokenizer"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nonesuch"}'), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}'), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), "cannot be loaded"),
    ],
)
def test_a_folder_that_is_not_a_model_is_named_with_its_fault(make_run, model_folder, tmp_path, spoil, message):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_folder("qwen3").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        TorchBackend(make_run("qwen3", f"model.path={folder}"))
    assert "model.path" in str(caught.value)


def test_missing_weights_are_not_replaced_by_random_ones(make_run, model_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    for path in model_folder("qwen3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        TorchBackend(make_run("qwen3", f"model.path={tmp_path}"))


def test_a_missing_folder_and_a_missing_device(make_run):
    with pytest.raises(ModelError, match="no such folder"):
        TorchBackend(make_run("qwen3", "model.path=/nowhere/at/all"))
    with pytest.raises(ModelError, match="not a device"):
        TorchBackend(make_run("qwen3", "train.backend.device=gpu"))
