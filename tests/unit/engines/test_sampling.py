"""The sampler draws from exactly the distribution whose log-probs it reports."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.engines.sampling import SamplingRows, inverse_cdf, sample, uniforms

NONE = SamplingRows()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The statistic over its degrees of freedom, cells with small expectations merged."""
    expected = probabilities * counts.sum()
    order = np.argsort(expected)
    small = order[np.cumsum(expected[order]) < 10]
    big = np.setdiff1d(order, small)
    cells = [(counts[i], expected[i]) for i in big]
    if len(small):
        cells.append((counts[small].sum(), max(expected[small].sum(), 1e-9)))
    value = sum((c - e) ** 2 / e for c, e in cells)
    return float((value - (len(cells) - 1)) / np.sqrt(2 * (len(cells) - 1)))  # about standard normal


def test_uniforms_are_uniform_over_seeds_and_over_indices():
    one = np.ones(50_000)
    for seeds, indices in (
        (np.arange(50_000), 0 * one),
        (0 * one, np.arange(50_000)),
        (np.repeat(np.arange(500), 100), np.tile(np.arange(100), 500)),
        (np.uint64(2**63) + np.arange(50_000, dtype=np.uint64), 3 * one),
    ):
        values = uniforms(np.asarray(seeds).astype(np.uint64), np.asarray(indices).astype(np.int64))
        assert values.min() >= 0
        assert values.max() < 1
        counts = np.bincount((values * 100).astype(int), minlength=100)
        assert abs(chi_square(counts, np.full(100, 0.01))) < 4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_a_uniform_depends_on_seed_and_index_alone():
    seeds, indices = np.array([3, 3, 4], np.uint64), np.array([0, 1, 0])
    together = uniforms(seeds, indices)
    assert len(set(together.tolist())) == 3
    alone = [uniforms(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone


@pytest.mark.parametrize("vocab", [7, 64, 200])
def test_frequencies_follow_the_probabilities(vocab):
    torch.manual_seed(vocab)
    num = 40_000
    logits = torch.randn(vocab) * 2
    draws = torch.from_numpy(uniforms(np.arange(num, dtype=np.uint64), np.zeros(num, np.int64)))
    tokens, logprobs = sample(logits.expand(num, -1), NONE, draws)
    probabilities = torch.softmax(logits.double(), -1).numpy()
    assert abs(chi_square(np.bincount(tokens.numpy(), minlength=vocab), probabilities)) < 4
    assert np.allclose(logprobs.numpy(), np.log(probabilities)[tokens.numpy()], atol=2e-6)


@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_never_a_token_of_probability_zero(vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocab, generator=generator) * 10
    logits[torch.rand(8, vocab, generator=generator) < 0.6] = -torch.inf
    logits[:, vocab // 2] = 0.0
    edges = torch.tensor([0.0, 1 - 2**-53, 1 - 2**-24, 2**-53, 0.5, 0.25, 0.999999, 0.1], dtype=torch.float64)
    probabilities = torch.softmax(logits, -1)
    tokens = inverse_cdf(probabilities, edges)
    assert (probabilities.gather(1, tokens[:, None]) > 0).all()
    # and it is the token at which the running sum passes the draw
    running = probabilities.double().cumsum(-1)
    upto = running.gather(1, tokens[:, None])[:, 0]
    assert (upto >= edges * running[:, -1] - 1e-6).all()
    assert (upto - probabilities.gather(1, tokens[:, None])[:, 0] <= edges * running[:, -1] + 1e-6).all()


def kept_by_loop(probabilities, top_k, top_p):
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    order = order[:top_k] if top_k else order
    total, kept, reached = sum(probabilities[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        reached += probabilities[i] / total
        if reached >= top_p:
            break
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (10, 0.5), (1, 1.0), (0, 1e-6), (100, 0.999)])
def test_filters_keep_what_a_loop_keeps_and_renormalise(top_k, top_p):
    torch.manual_seed(0)
    num, vocab, temperature = 3000, 40, 0.7
    logits = torch.randn(vocab) * 2
    probabilities = torch.softmax(logits.double() / temperature, -1).tolist()
    kept = kept_by_loop(probabilities, top_k, top_p)
    rows = SamplingRows(
        temperature=torch.full((num,), temperature),
        filtered=torch.arange(0, num, 2),  # the others are free
        top_p=torch.full((num // 2,), top_p),
        top_k=torch.full((num // 2,), top_k),
    )
    draws = torch.from_numpy(uniforms(np.arange(num, dtype=np.uint64), np.zeros(num, np.int64)))
    tokens, logprobs = sample(logits.expand(num, -1), rows, draws)
    assert set(tokens[::2].tolist()) <= set(kept)
    total = sum(probabilities[i] for i in kept)
    for start, norm in ((0, total), (1, 1.0)):
        wanted = [np.log(probabilities[t] / norm) for t in tokens[start::2].tolist()]
        assert np.allclose(logprobs[start::2].numpy(), wanted, atol=2e-6)
    assert len(set(tokens[1::2].tolist())) > len(kept) or len(kept) > 20


def test_greedy_rows_take_the_maximum_and_leave_the_others_alone():
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    draws = torch.full((4,), 0.5, dtype=torch.float64)
    greedy = torch.tensor([True, False, True, False])
    tokens, logprobs = sample(logits, SamplingRows(is_greedy=greedy), draws)
    free, _ = sample(logits, NONE, draws)
    assert torch.equal(tokens, torch.where(greedy, logits.argmax(-1), free))
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0], atol=1e-6)


def test_logits_that_are_not_finite_show_in_the_logprob():
    logits = torch.zeros(2, 130)
    logits[1, 5] = torch.nan
    tokens, logprobs = sample(logits, NONE, torch.tensor([0.3, 0.3], dtype=torch.float64))
    assert torch.isfinite(logprobs).tolist() == [True, False]
    assert (tokens < 130).all()
