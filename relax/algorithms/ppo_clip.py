"""The clipped policy objective (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), with KL, entropy bonus and correction.

loss = -w min(r A, clip(r, 1 - low, 1 + high) A) + kl.coef KL(policy || reference) - entropy_coef H,   r = exp(l - o)
"""

import torch
from torch import Tensor

from relax.algorithms.correction import correction_weight
from relax.algorithms.kl import kl_estimate
from relax.algorithms.objective import LossSums, TrainedTokens, aggregate
from relax.config.algorithm import DrGRPOConfig, GRPOConfig, PolicyGradientConfig

# A ratio beyond exp(20) is clipped anyway; without a bound it overflows, and 0 * inf in the gradient is not a number.
_MAX_LOG_RATIO = 20.0


class PPOClip:
    """Per token; aggregated as `config.aggregation` says, for Dr. GRPO over a fixed length."""

    def __init__(self, config: PolicyGradientConfig, length_budget: int) -> None:
        self._config, self._length_budget = config, length_budget
        self._how: str = "token_mean"
        if isinstance(config, GRPOConfig):
            self._how = config.aggregation
        elif isinstance(config, DrGRPOConfig):
            self._how = "fixed_length"
        self.entropy_gradient = config.entropy_coef > 0
        self.zero_without_advantage = config.kl.coef == 0 and config.entropy_coef == 0

    def __call__(self, tokens: TrainedTokens) -> LossSums:
        config, logprobs, advantages = self._config, tokens.logprobs, tokens.advantages
        assert advantages is not None, "a policy objective needs advantages"
        old = self._old(tokens)
        ratio = torch.exp((logprobs - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        weight = correction_weight(config.correction, old, tokens.rollout)
        if weight is not None:
            per_token = per_token * weight
        total, count = self._aggregate(per_token, tokens)
        out = LossSums(total, count)
        out.sums["pg_loss"] = (total.detach(), count)
        self._add_kl(out, tokens)
        self._add_entropy(out, tokens)
        out.sums["loss"] = (out.total.detach(), count)
        _ratio_metrics(out, ratio.detach(), advantages, config)
        trainer = old if config.old_logprobs == "recompute" else logprobs.detach()
        if tokens.rollout is not None:
            _mismatch_metrics(out, trainer, tokens.rollout)
        return out

    def _old(self, tokens: TrainedTokens) -> Tensor:
        """The proximal policy's log-probs, as `algorithm.old_logprobs` says."""
        source = {"rollout": tokens.rollout, "recompute": tokens.old, "current": tokens.logprobs.detach()}
        old = source[self._config.old_logprobs]
        assert old is not None, f"no log-probs for algorithm.old_logprobs = {self._config.old_logprobs!r}"
        return old

    def _aggregate(self, per_token: Tensor, tokens: TrainedTokens) -> tuple[Tensor, float]:
        return aggregate(per_token, tokens, self._how, self._length_budget)

    def _add_kl(self, out: LossSums, tokens: TrainedTokens) -> None:
        if tokens.ref is None:
            return
        kl = kl_estimate(self._config.kl.kind, tokens.logprobs, tokens.ref)
        out.sums["kl"] = (kl.detach().sum(), float(kl.numel()))
        if self._config.kl.coef > 0:
            out.total = out.total + self._config.kl.coef * self._aggregate(kl, tokens)[0]

    def _add_entropy(self, out: LossSums, tokens: TrainedTokens) -> None:
        if tokens.entropy is None:
            return
        out.sums["entropy"] = (tokens.entropy.detach().sum(), float(tokens.entropy.numel()))
        if self.entropy_gradient:
            out.total = out.total - self._config.entropy_coef * self._aggregate(tokens.entropy, tokens)[0]


def _ratio_metrics(out: LossSums, ratio: Tensor, advantages: Tensor, config: PolicyGradientConfig) -> None:
    """How far the policy moved from the proximal one, where the clip bit, and the advantages that it was trained on."""
    count = float(ratio.numel())
    low = (ratio < 1 - config.clip_low) & (advantages < 0)
    high = (ratio > 1 + config.clip_high) & (advantages > 0)
    out.sums |= {
        "clip_fraction/low": (low.sum(), count),
        "clip_fraction/high": (high.sum(), count),
        "clip_fraction": ((low | high).sum(), count),
        "ratio/mean": (ratio.sum(), count),
        "advantage/mean": (advantages.sum(), count),
        "advantage/mean_square": (advantages.square().sum(), count),
    }
    if count:
        out.maxima["ratio/max"] = ratio.max()


def _mismatch_metrics(out: LossSums, trainer: Tensor, rollout: Tensor) -> None:
    """The trainer's log-probs (recomputed, else current) against those that the engine sampled with.

    `rollout_train_kl` is k3 of KL(rollout || trainer); the weights `exp(trainer - rollout)` give the effective sample size.
    """
    gap = trainer - rollout
    weight, count = torch.exp(gap), float(gap.numel())
    out.sums |= {
        "rollout_train_logprob_diff/mean": (gap.abs().sum(), count),
        "rollout_train_kl": ((weight - 1 - gap).sum(), count),
        "importance_weight/mean": (weight.sum(), count),
        "importance_weight/mean_square": (weight.square().sum(), count),
    }
    if count:
        out.maxima["rollout_train_logprob_diff/max"] = gap.abs().max()
