"""Every loss of the table: against a plain loop, and that no split of the batch changes anything."""

import itertools
import math
from dataclasses import fields, replace

import pytest
import torch
from loop_losses import loop_loss
from loss_cases import BESIDE, BUDGET, CASES, POLICY_CASES, SETTINGS, case_id, gradients, leaves, make_tokens, part

from relax.algorithms.objective import TrainedTokens
from relax.algorithms.table import ALGORITHMS, OBJECTIVES, make_objective
from relax.config.algorithm import CISPOConfig, GRPOConfig, GSPOConfig, OPDFullConfig, ReinforceConfig, SAPOConfig

every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
every_policy = pytest.mark.parametrize("case", POLICY_CASES, ids=case_id)


def test_every_objective_is_reached_by_a_line_of_the_table():
    assert {ALGORITHMS[case.name].objective(case.config) for case in POLICY_CASES} == set(OBJECTIVES)
    assert set(SETTINGS) == {*ALGORITHMS, *BESIDE}


@every_case
def test_loss_and_gradient_match_the_loop(case):
    tokens = case.tokens([3, 0, 1, 9, 4])
    loss = case.make()(tokens)
    wanted = loop_loss(case, tokens)
    assert float(loss.total.detach()) / loss.count == pytest.approx(float(wanted.detach()), rel=1e-9)
    for found, expected in zip(gradients(loss.total / loss.count, tokens), gradients(wanted, tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    name = "value_loss" if case.name == "value" else "loss"
    assert float(loss.sums[name][0]) == pytest.approx(float(loss.total.detach()))


@every_case
@pytest.mark.parametrize("edges", [(0, 6), (0, 3, 6), (0, 2, 3, 5, 6), (0, 1, 6)], ids=["1", "2", "4", "uneven"])
def test_splits_change_neither_gradient_nor_metrics(case, edges):
    tokens, objective = case.tokens([3, 1, 0, 9, 4, 2]), case.make()

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
        return gradients(total / count, tokens), {n: s / c for n, (s, c) in sums.items()}, maxima

    whole, found = run((0, 6)), run(edges)
    for a, b in zip(whole[0], found[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    assert found[1] == pytest.approx(whole[1], rel=1e-12, abs=1e-15)
    assert found[2] == whole[2]


@every_case
def test_samples_without_trained_tokens_change_nothing(case):
    tokens = case.tokens([3, 5])
    padded = replace(tokens, sample=tokens.sample * 2 + 1, num_samples=5)
    plain, found = case.make()(tokens), case.make()(padded)
    assert found.count == plain.count
    for a, b in zip(gradients(plain.total, tokens), gradients(found.total, tokens), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    assert {name: count for name, (_, count) in found.sums.items()} == {n: count for n, (_, count) in plain.sums.items()}
    assert {n: float(v) for n, (v, _) in found.sums.items()} == pytest.approx({n: float(v) for n, (v, _) in plain.sums.items()})


@every_case
def test_no_tokens_give_an_exact_zero_with_a_graph(case):
    tokens = case.tokens([0, 0])
    loss = case.make()(tokens)
    assert (float(loss.total.detach()), loss.count) == (0.0, 0.0)
    assert loss.maxima == {}
    loss.total.backward()
    assert any(leaf.grad is not None for leaf in leaves(tokens))


@every_policy
def test_a_sample_without_advantage_has_no_gradient_where_the_objective_says_so(case):
    objective = case.make()
    tokens = replace(make_tokens([3, 4]), advantages=torch.zeros(7, dtype=torch.float64))
    found = gradients(objective(tokens).total, tokens)
    assert (not any(gradient.any() for gradient in found)) == objective.zero_without_advantage


@every_policy
def test_on_policy_the_ratio_is_exactly_one_and_nothing_is_clipped(case):
    tokens = make_tokens([3, 4])
    same = tokens.logprobs.detach().clone()
    loss = case.make()(replace(tokens, old=same, rollout=same))
    sums = {name: float(value) / count for name, (value, count) in loss.sums.items()}
    assert sums.get("ratio/mean", 1.0) == 1.0
    assert float(loss.maxima.get("ratio/max", 1.0)) == 1.0
    assert all(value == 0.0 for name, value in sums.items() if "fraction" in name or "dropped" in name)
    assert sums.get("correction/weight", 1.0) == 1.0
    assert sums["rollout_train_kl"] == 0.0


@pytest.mark.parametrize(
    "config",
    [GRPOConfig(), GSPOConfig(), SAPOConfig(), CISPOConfig(), ReinforceConfig()],
    ids=lambda c: c.type,
)
def test_on_policy_every_objective_has_the_policy_gradient(config):
    """d loss / d l = -A: whatever the surrogate, at ratio 1 it is the plain policy gradient."""
    tokens = make_tokens([5])
    same = tokens.logprobs.detach().clone()
    advantages = torch.full_like(same, -0.7)
    tokens = replace(tokens, rollout=same, advantages=advantages)
    config = config.model_copy(update={"old_logprobs": "rollout"})
    (gradient,) = torch.autograd.grad(make_objective(config, length_budget=BUDGET)(tokens).total, tokens.logprobs)
    scale = 5 if config.aggregation == "sequence_mean" else 1
    torch.testing.assert_close(gradient * scale, -advantages)


def test_gspo_is_the_clipped_ratio_of_sequences_averaged_over_sequences():
    tokens = make_tokens([2, 6, 3])
    advantages = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    tokens = replace(tokens, advantages=advantages[tokens.sample])
    config = GSPOConfig(clip_low=0.02, clip_high=0.03)
    loss = make_objective(config, length_budget=BUDGET)(tokens)
    wanted = 0.0
    for number, places in enumerate(([0, 1], range(2, 8), range(8, 11))):
        s = math.exp(sum(float(tokens.logprobs[i].detach() - tokens.rollout[i]) for i in places) / len(places))
        a = float(advantages[number])
        wanted -= min(s * a, min(max(s, 0.98), 1.03) * a) / 3
    assert float(loss.total.detach()) / loss.count == pytest.approx(wanted)
    token_form = make_objective(config.model_copy(update={"token_level": True}), length_budget=BUDGET)(tokens)
    assert float(token_form.total.detach()) == pytest.approx(float(loss.total.detach()))


def test_a_dual_clip_bounds_what_a_bad_sample_can_do():
    tokens = replace(make_tokens([1]), rollout=torch.tensor([-9.0]).double(), advantages=torch.tensor([-1.0]).double())
    loss = make_objective(GRPOConfig(dual_clip=3.0), length_budget=BUDGET)(tokens)
    assert float(loss.total.detach()) == 3.0
    assert not gradients(loss.total, tokens)[0].any()
    assert float(loss.sums["clip_fraction/dual"][0]) == 1.0


@every_policy
@pytest.mark.parametrize("shift", [-800.0, 800.0])
def test_a_ratio_that_would_overflow_has_a_finite_gradient(case, shift):
    tokens = make_tokens([4])
    far = tokens.logprobs.detach() + shift
    loss = case.make()(replace(tokens, rollout=far, old=far))
    assert torch.isfinite(loss.total)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(loss.total, tokens))


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


@every_case
def test_a_missing_column_is_a_mistake_or_changes_nothing(case):
    """Nothing that a loss needs is taken for zeros."""
    tokens, objective = case.tokens([2, 3]), case.make()
    optional = [f.name for f in fields(tokens) if f.name not in ("logprobs", "values", "sample", "num_samples")]
    reference = gradients(objective(tokens).total, tokens)
    for name in optional:
        try:
            loss = objective(replace(tokens, **{name: None}))
        except (AssertionError, TypeError, AttributeError):
            continue
        found = gradients(loss.total, replace(tokens))
        for a, b in zip(reference, found, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_a_divergence_is_zero_for_equal_policies_and_never_less(kind):
    objective = make_objective(OPDFullConfig(divergence=kind), length_budget=BUDGET)
    tokens = make_tokens([6])
    equal = objective(replace(tokens, top_teacher=tokens.top.detach()))
    assert float(equal.total.detach()) == pytest.approx(0.0, abs=1e-12)
    assert not any(gradient.abs().max() > 1e-12 for gradient in gradients(equal.total, tokens))
    assert float(objective(tokens).total.detach()) > 0
