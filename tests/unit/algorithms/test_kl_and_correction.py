"""The terms beside the surrogate: KL and entropy against finite differences, weights against their definitions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_cases import make_tokens

from relax.algorithms.correction import add_correction_metrics, correction_weight
from relax.algorithms.kl import kl_estimate
from relax.algorithms.objective import LossSums
from relax.algorithms.shaping import kl_of_tokens
from relax.config.correction import (
    DecoupledConfig,
    IcePopConfig,
    NoCorrectionConfig,
    SequenceConfig,
    TISConfig,
)
from relax.train.logprobs import token_logprobs

KINDS = ("k1", "k2", "k3")


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_zero_for_equal_policies_and_its_gradient_is_that_of_finite_differences(kind):
    logprobs = torch.linspace(-3, -0.1, 6, dtype=torch.float64).requires_grad_()
    assert not kl_estimate(kind, logprobs, logprobs.detach()).any()
    ref = logprobs.detach() + torch.linspace(-0.5, 0.5, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(kind, x, ref), logprobs)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_is_unbiased(kind):
    """Averaged over the policy's own distribution, the estimator is the divergence."""
    generator = torch.Generator().manual_seed(0)
    policy, ref = (torch.log_softmax(torch.randn(50, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    exact = (policy.exp() * (policy - ref)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(kind, policy, ref)).sum(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_in_the_reward_is_that_of_the_loss(kind):
    policy, ref = torch.linspace(-3, -0.1, 6, dtype=torch.float64), torch.linspace(-0.5, -2, 6, dtype=torch.float64)
    assert np.allclose(kl_of_tokens(kind, policy.numpy(), ref.numpy()), kl_estimate(kind, policy, ref).numpy(), rtol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_have_the_gradients_of_finite_differences(temperature):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    targets, rows = torch.tensor([1, 6, 0, 2]), torch.tensor([0, 1, 2, 2])

    def both(hidden, weight):
        return token_logprobs(hidden, (weight, None), targets, rows, temperature=temperature, chunk=2, entropy_gradient=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))


def weights(config, gaps, lengths):
    """Weights for these `o - b` of samples with these lengths, and the metrics as means."""
    gap = torch.tensor(gaps, dtype=torch.float64)
    tokens = replace(make_tokens(lengths), rollout=-gap)
    weight = correction_weight(config, torch.zeros_like(gap), tokens)
    out = LossSums(gap.sum(), 1.0)
    add_correction_metrics(out, config, weight, tokens)
    return weight.tolist(), {name: float(value) / count for name, (value, count) in out.sums.items()}


GAPS = [math.log(w) for w in (1.0, 3.0, 0.1, 1.005, 0.995)]


@pytest.mark.parametrize(
    ("config", "wanted", "metrics"),
    [
        (TISConfig(), [1.0, 2.0, 0.1, 1.005, 0.995], {"correction/capped_fraction": 0.2}),
        (DecoupledConfig(cap=2.5), [1.0, 2.5, 0.1, 1.005, 0.995], {"correction/capped_fraction": 0.2}),
        (
            IcePopConfig(high=2.0),
            [1.0, 0.0, 0.0, 1.005, 0.995],
            {"correction/zeroed_fraction": 0.4, "correction/dropped_samples": 0.0},
        ),
        (
            SequenceConfig(),
            [0.0, 0.0, 0.0, 1.0, 1.0],
            {"correction/zeroed_fraction": 0.6, "correction/dropped_samples": 0.5},
        ),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_weights_and_what_they_cut(config, wanted, metrics):
    found, told = weights(config, GAPS, [3, 0, 2])
    assert found == pytest.approx(wanted)
    assert told == pytest.approx({"correction/weight": sum(wanted) / 5} | metrics)


def test_a_sequence_is_judged_by_its_mean_not_by_its_tokens():
    """Gaps of opposite sign cancel: 2 and 1/2 have the geometric mean 1."""
    assert weights(SequenceConfig(), [math.log(2), -math.log(2), 0.02], [2, 1])[0] == [1.0, 1.0, 0.0]


def test_no_correction_has_no_weight_and_a_weight_has_no_gradient():
    tokens = make_tokens([3])
    assert correction_weight(NoCorrectionConfig(), tokens.logprobs, tokens) is None
    weight = correction_weight(TISConfig(), tokens.logprobs, tokens)
    assert weight is not None
    assert not weight.requires_grad
