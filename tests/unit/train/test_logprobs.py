"""Chunked log-probs and entropies against the plain formula, in double precision, gradients included."""

import pytest
import torch

from relax.train.logprobs import token_logprobs, top_logprobs


def inputs(bias=True):
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 5, dtype=torch.float64), torch.randn(23, 5, dtype=torch.float64)
    leaves = [hidden, weight, *([torch.randn(23, dtype=torch.float64)] if bias else [])]
    return [leaf.requires_grad_() for leaf in leaves], torch.randint(0, 23, (17,)), torch.randint(0, 11, (17,))


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(chunk, bias):
    leaves, targets, rows = inputs(bias)

    def found(hidden, weight, bias=None):
        head = (weight, bias)
        return token_logprobs(hidden, head, targets, rows, temperature=0.6, chunk=chunk, entropy_gradient=True)

    logits = leaves[0] @ leaves[1].t() + (leaves[2] if bias else 0)
    plain = (logits / 0.6).log_softmax(-1)[rows]
    logprobs, entropy = found(*leaves)
    torch.testing.assert_close(logprobs, plain.gather(1, targets[:, None])[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(found, leaves)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_banned_tokens_have_no_probability_and_no_gradient(chunk, bias):
    leaves, targets, rows = inputs(bias)
    banned = torch.tensor([3, 20])
    targets = torch.where(torch.isin(targets, banned), 4, targets)

    def found(hidden, weight, bias=None):
        options = {"temperature": 0.6, "chunk": chunk, "entropy_gradient": True, "banned": banned}
        return token_logprobs(hidden, (weight, bias), targets, rows, **options)

    logits = leaves[0] @ leaves[1].t() + (leaves[2] if bias else 0)
    kept = [token for token in range(23) if token not in banned]
    plain = torch.full_like(logits, -torch.inf).index_copy(1, torch.tensor(kept), (logits / 0.6)[:, kept].log_softmax(-1))[rows]
    logprobs, entropy = found(*leaves)
    torch.testing.assert_close(logprobs, plain.gather(1, targets[:, None])[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(plain[:, kept].exp() * plain[:, kept]).sum(-1), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(found, leaves)
    (logprobs.sum() + entropy.sum()).backward()
    assert not leaves[1].grad[banned].any()
    with torch.no_grad():
        head = (leaves[1], leaves[2] if bias else None)
        ids, best = top_logprobs(leaves[0], head, 21, 23, temperature=0.6, chunk=chunk, banned=banned)
    assert sorted(ids[0].tolist()) == kept
    torch.testing.assert_close(best.exp().sum(-1), torch.ones(11, dtype=torch.float64))


def test_chunks_give_the_same_gradient_in_float32():
    torch.manual_seed(0)
    grads = []
    for chunk in (7, 1000):
        torch.manual_seed(0)
        hidden, weight = torch.randn(300, 16).requires_grad_(), torch.randn(50, 16).requires_grad_()
        logprobs, _ = token_logprobs(hidden, (weight, None), torch.randint(0, 50, (300,)), temperature=1.0, chunk=chunk)
        logprobs.square().sum().backward()
        grads.append((hidden.grad, weight.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


def test_very_unlikely_tokens_keep_their_log_prob():
    """exp(-200) is 0 in float32; its logarithm must not be."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [-200.0], [3.0]])
    logprobs, _ = token_logprobs(
        hidden.expand(3, 1).contiguous(), (weight, None), torch.tensor([0, 1, 2]), temperature=1.0, chunk=8
    )
    torch.testing.assert_close(logprobs, weight[:, 0].log_softmax(0))


def test_no_rows_give_a_live_graph():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.zeros(9, 4, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, (weight, None), torch.zeros(0, dtype=torch.long), temperature=1.0, chunk=8)
    assert len(logprobs) == len(entropy) == 0
    logprobs.sum().backward()
    assert not weight.grad.any()


def test_bfloat16_comes_out_in_float32():
    torch.manual_seed(0)
    hidden = torch.randn(6, 8).bfloat16().requires_grad_()
    weight = torch.randn(20, 8).bfloat16().requires_grad_()
    targets = torch.randint(0, 20, (6,))
    logprobs, _ = token_logprobs(hidden, (weight, None), targets, temperature=0.7, chunk=4)
    plain = ((hidden @ weight.t()).float() / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, plain, rtol=1e-4, atol=2e-4)
    logprobs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_the_likeliest_tokens_are_those_of_the_plain_formula(chunk, bias):
    (hidden, *head), _, _ = inputs(bias)
    logits = hidden @ head[0].t() + (head[1] if bias else 0)
    wanted = (logits / 0.6).log_softmax(-1)[:, :20].topk(5, -1)  # over all 23, of which the last three are not to be named
    ids, logprobs = top_logprobs(hidden, (head[0], head[1] if bias else None), 5, 20, temperature=0.6, chunk=chunk)
    assert torch.equal(ids, wanted.indices)
    torch.testing.assert_close(logprobs, wanted.values, rtol=1e-12, atol=1e-12)
