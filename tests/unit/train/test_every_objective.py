"""Every algorithm of the table on a model: packing, padding, what masked slots hold, and the teacher's likeliest tokens."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from train_batches import VOCABULARY, make_batch

from relax.algorithms.table import ALGORITHMS
from relax.train.backend import TrainBatch
from relax.train.torch_backend import TorchBackend
from relax.types import Ragged

TOP = 4
PER_TOKEN = [f.name for f in fields(TrainBatch) if f.name not in ("tokens", "group_ids", "features")]
OVERRIDES = {
    "custom": ["algorithm.path=mine:f"],
    "opd": ["teacher.model.path=t"],
    "opd_full": ["algorithm.correction.type=tis", "teacher.model.path=t"],
    "grpo": ["algorithm.kl.coef=0.2", "algorithm.entropy_coef=0.1", "algorithm.aggregation=sequence_mean"],
    "rloo": ["algorithm.old_logprobs=recompute", "algorithm.correction.type=icepop", "algorithm.dual_clip=3.0"],
    "gspo": ["algorithm.clip_high=0.2", "algorithm.clip_low=0.2"],
}
every_algorithm = pytest.mark.parametrize("kind", sorted(ALGORITHMS))


def make_full_batch(seed=0):
    """Every column that there is, on the trained tokens of 9 samples."""
    batch = make_batch((1, 3, 5), seed=seed)
    rng, count = np.random.default_rng(seed), len(batch.tokens.values)
    ids = np.stack([rng.choice(VOCABULARY, TOP, replace=False) for _ in range(count)]).astype(np.int32)
    return replace(
        batch,
        teacher_logprobs=Ragged(rng.normal(-5.7, 0.3, count).astype(np.float32), batch.tokens.offsets),
        teacher_top_ids=Ragged(ids, batch.tokens.offsets),
        teacher_top_logprobs=Ragged(rng.normal(-4.0, 0.3, (count, TOP)).astype(np.float32), batch.tokens.offsets),
    )


def changed(batch, change, names=PER_TOKEN):
    """The batch with `change(name, values of a row, mask of the row)` in place of each row of each column."""
    columns = {}
    for name in names:
        column = getattr(batch, name)
        if column is not None:
            columns[name] = Ragged.pack([change(name, column[i], batch.loss_mask[i]) for i in range(len(batch))])
    return replace(batch, **columns)


def rows(batch, keep):
    columns = {n: Ragged.pack([getattr(batch, n)[i] for i in keep]) for n in PER_TOKEN if getattr(batch, n) is not None}
    return replace(batch, tokens=Ragged.pack([batch.tokens[i] for i in keep]), group_ids=batch.group_ids[keep], **columns)


def gradients(make_run, kind, *batches, extra=()):
    """Gradients and metrics of the batches, one `forward_backward` each."""
    run = make_run("qwen3", f"algorithm.type={kind}", *OVERRIDES.get(kind, ()), "rollout.max_staleness=1", *extra)
    backend = TorchBackend(run)
    sums = [backend.forward_backward(batch) for batch in batches]
    total = sums[0]
    for other in sums[1:]:
        total.add(other)
    return {name: gradient.clone() for name, gradient in backend.gradients().items()}, total.values()


def assert_close(found, wanted):
    for name, gradient in wanted[0].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    assert found[1] == pytest.approx(wanted[1], rel=1e-4, abs=1e-5)


@every_algorithm
def test_samples_apart_are_as_good_as_packed_together(make_run, kind):
    batch = make_full_batch()
    assert_close(
        gradients(make_run, kind, *(rows(batch, [row]) for row in range(len(batch)))), gradients(make_run, kind, batch)
    )


@every_algorithm
def test_neither_padding_nor_what_masked_slots_hold_matters(make_run, kind):
    """Padding is a tail without a mask; masked slots of every column, the padding's too, hold NaN and infinities."""
    batch = make_full_batch()

    def dirty(name, values, mask):
        padded = np.concatenate([values, np.zeros((5, *values.shape[1:]), values.dtype)])
        if values.dtype == np.float32:
            padded[np.concatenate([mask, np.zeros(5)]) == 0] = {"advantages": np.inf, "ref_logprobs": -np.inf}.get(name, np.nan)
        return padded

    padded = changed(replace(batch), dirty)
    tokens = Ragged.pack([np.concatenate([batch.tokens[i], np.zeros(5, np.int32)]) for i in range(len(batch))])
    found, wanted = gradients(make_run, kind, replace(padded, tokens=tokens)), gradients(make_run, kind, batch)
    assert all(torch.equal(found[0][name], gradient) for name, gradient in wanted[0].items())
    assert found[1] == wanted[1]


@every_algorithm
def test_a_batch_without_trained_tokens_has_no_loss(make_run, kind):
    batch = make_full_batch()
    masked = replace(batch, loss_mask=Ragged(np.zeros_like(batch.loss_mask.values), batch.loss_mask.offsets))
    found, metrics = gradients(make_run, kind, masked)
    assert not any(gradient.any() for gradient in found.values())
    assert metrics == {}


def test_on_policy_at_a_temperature_the_ratio_is_one(make_run):
    run = make_run("qwen3", "rollout.temperature=0.6")
    backend, batch = TorchBackend(run), make_batch()
    batch = replace(batch, rollout_logprobs=backend.logprobs(batch))
    metrics = backend.forward_backward(batch).values()
    assert (metrics["ratio/mean"], metrics["ratio/max"]) == (pytest.approx(1.0, abs=1e-5), pytest.approx(1.0, abs=1e-4))
    assert metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_policys_log_probs_of_the_teachers_tokens_are_those_of_the_whole_vocabulary(make_run, temperature):
    """A teacher that is the student itself leaves nothing to learn, at any temperature."""
    run = make_run("qwen3", "algorithm.type=opd_full", "teacher.model.path=t", f"rollout.temperature={temperature}")
    backend, batch = TorchBackend(run), make_full_batch()
    mask, teacher = np.zeros_like(batch.loss_mask.values), np.zeros_like(batch.teacher_top_logprobs.values)
    for row, start in enumerate(batch.tokens.offsets[:-1].tolist()):
        place = start + int(np.flatnonzero(batch.loss_mask[row])[0])  # one place of each sample is enough
        mask[place] = 1
        for rank, token in enumerate(batch.teacher_top_ids.values[place]):
            teacher[place, rank] = logprob_of(backend, batch.tokens.values[start:place], token)
    offsets = batch.tokens.offsets
    batch = replace(batch, loss_mask=Ragged(mask, offsets), teacher_top_logprobs=Ragged(teacher, offsets))
    assert backend.forward_backward(batch).values()["loss"] == pytest.approx(0.0, abs=1e-5)


def logprob_of(backend, context, token):
    """Of one token after others, by itself."""
    tokens, mask = np.append(context, token).astype(np.int32), np.zeros(len(context) + 1, np.uint8)
    mask[-1] = 1
    return backend.logprobs(TrainBatch(Ragged.pack([tokens]), Ragged.pack([mask]), np.zeros(1, np.int64))).values[-1]
