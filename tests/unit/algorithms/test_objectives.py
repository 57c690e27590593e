"""Every objective of the table: against a plain loop, and that no split of the batch changes anything."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from relax.algorithms.kl import kl_estimate
from relax.algorithms.objective import TrainedTokens
from relax.algorithms.table import ALGORITHMS, make_objective
from relax.config.algorithm import CorrectionConfig, DrGRPOConfig, GRPOConfig, KLConfig, RLOOConfig

torch.set_num_threads(1)

BUDGET = 7
FULL = {"kl": KLConfig(coef=0.3), "entropy_coef": 0.2, "correction": CorrectionConfig(type="tis", cap=1.1)}
SETTINGS = {
    "grpo": [GRPOConfig(), GRPOConfig(aggregation="sequence_mean"), GRPOConfig(old_logprobs="recompute", **FULL)],
    "dr_grpo": [DrGRPOConfig(), DrGRPOConfig(old_logprobs="current", **FULL)],
    "rloo": [RLOOConfig(clip_low=0.1, clip_high=0.3), RLOOConfig(old_logprobs="recompute", kl=KLConfig(coef=1.0, kind="k2"))],
}
CASES = [config for name in ALGORITHMS for config in SETTINGS[name]]  # a new line of the table needs its settings here
every_case = pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.type}-{c.old_logprobs}-kl{c.kl.coef}")


def make_tokens(lengths, seed=0):
    """Float64 tokens of samples with `lengths` trained tokens each; `logprobs` and `entropy` are leaves."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)

    def normal(scale, shift=0.0):
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale + shift

    logprobs = normal(0.5, -1.5)
    return TrainedTokens(
        logprobs.requires_grad_(),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        len(lengths),
        advantages=normal(1.0),
        old=logprobs.detach() + normal(0.2),
        rollout=logprobs.detach() + normal(0.3),
        ref=logprobs.detach() + normal(0.4),
        entropy=normal(0.3, 2.0).requires_grad_(),
    )


def part(tokens, first, last):
    """The samples `first` to `last - 1`, on the same leaves."""
    keep = (tokens.sample >= first) & (tokens.sample < last)
    names = ("logprobs", "advantages", "old", "rollout", "ref", "entropy")
    columns = {name: getattr(tokens, name)[keep] for name in names}
    return replace(tokens, sample=tokens.sample[keep] - first, num_samples=last - first, **columns)


def loop_loss(config, tokens):
    """The mean loss over the batch, token by token in plain Python."""
    rows = zip(
        *(getattr(tokens, n).tolist() for n in ("logprobs", "advantages", "old", "rollout", "ref", "entropy")), strict=True
    )
    by_sample = {}
    for sample, (logprob, advantage, old, rollout, ref, entropy) in zip(tokens.sample.tolist(), rows, strict=True):
        proximal = {"rollout": rollout, "recompute": old, "current": logprob}[config.old_logprobs]
        ratio = math.exp(logprob - proximal)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        value = -min(ratio * advantage, clipped * advantage)
        if config.correction.type == "tis":
            value *= min(math.exp(proximal - rollout), config.correction.cap)
        gap = ref - logprob
        kl = {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - gap - 1}[config.kl.kind]
        value += config.kl.coef * kl - config.entropy_coef * entropy
        by_sample.setdefault(sample, []).append(value)
    sequences = list(by_sample.values())
    if config.type == "dr_grpo":
        return sum(sum(s) / BUDGET for s in sequences) / len(sequences)
    if getattr(config, "aggregation", "token_mean") == "sequence_mean":
        return sum(sum(s) / len(s) for s in sequences) / len(sequences)
    return sum(map(sum, sequences)) / sum(map(len, sequences))


@every_case
def test_matches_the_loop(config):
    tokens = make_tokens([3, 0, 1, 9, 4])
    loss = make_objective(config, length_budget=BUDGET)(tokens)
    assert float(loss.total.detach()) / loss.count == pytest.approx(loop_loss(config, tokens), rel=1e-12)
    assert float(loss.sums["loss"][0]) == pytest.approx(float(loss.total.detach()))


@every_case
@pytest.mark.parametrize("edges", [(0, 6), (0, 3, 6), (0, 2, 3, 5, 6), (0, 1, 6)], ids=["1", "2", "4", "uneven"])
def test_splits_change_neither_gradient_nor_metrics(config, edges):
    tokens, objective = make_tokens([3, 1, 0, 9, 4, 2]), make_objective(config, length_budget=BUDGET)
    inputs = (tokens.logprobs, tokens.entropy)

    def run(bounds):
        total, count, sums, maxima = 0.0, 0.0, {}, {}
        for first, last in itertools.pairwise(bounds):
            loss = objective(part(tokens, first, last))
            total, count = total + loss.total, count + loss.count
            for name, (value, number) in loss.sums.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(value), before[1] + number)
            for name, value in loss.maxima.items():
                maxima[name] = max(float(value), maxima.get(name, -math.inf))
        grads = torch.autograd.grad(total / count, inputs, allow_unused=True)
        return [g for g in grads if g is not None], {n: s / c for n, (s, c) in sums.items()}, maxima

    whole, found = run((0, 6)), run(edges)
    for a, b in zip(whole[0], found[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    assert found[1] == pytest.approx(whole[1], rel=1e-12)
    assert found[2] == whole[2]


@every_case
def test_no_tokens_give_an_exact_zero_with_a_graph(config):
    tokens = make_tokens([0, 0])
    loss = make_objective(config, length_budget=BUDGET)(tokens)
    assert (float(loss.total.detach()), loss.count) == (0.0, 0.0)
    loss.total.backward()
    assert tokens.logprobs.grad is not None


@every_case
def test_a_sample_without_advantage_has_no_gradient_where_the_objective_says_so(config):
    objective = make_objective(config, length_budget=BUDGET)
    tokens = replace(make_tokens([3, 4]), advantages=torch.zeros(7, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(objective(tokens).total, tokens.logprobs)
    assert (not gradient.any()) == objective.zero_without_advantage


@pytest.mark.parametrize("shift", [-800.0, 800.0])
def test_a_ratio_that_would_overflow_has_a_finite_gradient(shift):
    tokens = make_tokens([4])
    tokens = replace(tokens, rollout=tokens.logprobs.detach() + shift)
    loss = make_objective(GRPOConfig(), length_budget=BUDGET)(tokens)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(tokens.logprobs.grad).all()


def test_token_mean_is_a_mean_over_tokens_however_they_are_split():
    """100 tokens at 2.0 and 900 at 0.5: 0.65, not the 1.25 of averaged averages."""
    objective = make_objective(GRPOConfig(old_logprobs="current"), length_budget=BUDGET)
    total = count = 0.0
    for number, value in ((100, 2.0), (900, 0.5)):
        zeros = torch.zeros(number, dtype=torch.float64)
        loss = objective(TrainedTokens(zeros, zeros.long(), 1, advantages=zeros - value))
        total, count = total + float(loss.total.detach()), count + loss.count
    assert total / count == pytest.approx(0.65)


def test_clip_fractions_count_only_where_the_clip_bites():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    tokens = TrainedTokens(
        ratio.log(), torch.zeros(5, dtype=torch.long), 1, advantages=advantages, rollout=torch.zeros(5).double()
    )
    sums = make_objective(GRPOConfig(), length_budget=BUDGET)(tokens).sums
    means = {name: float(value) / count for name, (value, count) in sums.items()}
    assert (means["clip_fraction/high"], means["clip_fraction/low"], means["clip_fraction"]) == (0.2, 0.2, 0.4)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_is_zero_for_equal_policies_and_carries_its_gradient(kind):
    logprobs = torch.linspace(-3, -0.1, 6, dtype=torch.float64).requires_grad_()
    assert not kl_estimate(kind, logprobs, logprobs.detach()).any()
    ref = logprobs.detach() + torch.linspace(-0.5, 0.5, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(kind, x, ref), logprobs)
