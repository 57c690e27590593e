"""What the policy objectives share: log-probs of the old policy, correction, KL, entropy, aggregation and metrics.

loss = aggregate(w x surrogate) + kl.coef aggregate(KL(policy || reference)) - entropy_coef aggregate(H)

An objective is a class with one method, the surrogate of each token.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from relax.algorithms.correction import add_correction_metrics, correction_weight
from relax.algorithms.kl import kl_estimate
from relax.algorithms.objective import LossSums, TrainedTokens, aggregate
from relax.config.algorithm import PolicyGradientConfig

# A ratio beyond exp(20) is clipped anyway; without a bound it overflows, and 0 * inf in the gradient is not a number.
_MAX_LOG_RATIO = 20.0


@dataclass
class Surrogate:
    """`loss [S]` of each token before its weight; `ratio [S]`, as it entered. `cut`: by name, the tokens `[S]` whose gradient
    was taken away."""

    loss: Tensor
    ratio: Tensor | None = None
    cut: dict[str, Tensor] = field(default_factory=dict)


class PolicyObjective:
    """Built as `Class(config, length_budget)`; `length_budget` in tokens, for `fixed_length`."""

    needs_advantages = True

    def __init__(self, config: PolicyGradientConfig, length_budget: int) -> None:
        self._common, self._length_budget = config, length_budget
        self._kl_coef = config.kl.coef if config.kl.place == "loss" else 0.0
        self.entropy_gradient = config.entropy_coef > 0
        self.zero_without_advantage = self.needs_advantages and self._kl_coef == 0 and config.entropy_coef == 0

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        """The loss of each token, given the old policy's log-probs `[S]` and the advantages `[S]`."""
        raise AssertionError(f"{type(self).__name__} has no surrogate")

    def __call__(self, tokens: TrainedTokens) -> LossSums:
        old = self._old(tokens)
        advantages = tokens.advantages
        if advantages is None:
            assert not self.needs_advantages, "a policy objective needs advantages"
            advantages = torch.zeros_like(old)
        surrogate = self.surrogate(tokens, old, advantages)
        weight = correction_weight(self._common.correction, old, tokens)
        total, count = self._aggregate(surrogate.loss if weight is None else surrogate.loss * weight, tokens)
        out = LossSums(total, count)
        out.sums["pg_loss"] = (total.detach(), count)
        self._add_kl(out, tokens)
        self._add_entropy(out, tokens)
        out.sums["loss"] = (out.total.detach(), count)
        if weight is not None:
            add_correction_metrics(out, self._common.correction, weight, tokens)
        _surrogate_metrics(out, surrogate)
        if self.needs_advantages:
            _advantage_metrics(out, advantages)
        current = tokens.logprobs.detach()
        if tokens.teacher is not None:
            # of the policy that sampled: for another one, these tokens are no sample
            sampled = current if tokens.rollout is None else tokens.rollout
            out.sums["teacher_kl"] = ((sampled - tokens.teacher).sum(), float(current.numel()))
        if tokens.rollout is not None:
            _mismatch_metrics(out, old if self._common.old_logprobs == "recompute" else current, tokens.rollout)
        return out

    def _old(self, tokens: TrainedTokens) -> Tensor:
        """The proximal policy's log-probs, as `algorithm.old_logprobs` says."""
        source = {"rollout": tokens.rollout, "recompute": tokens.old, "current": tokens.logprobs.detach()}
        old = source[self._common.old_logprobs]
        assert old is not None, f"no log-probs for algorithm.old_logprobs = {self._common.old_logprobs!r}"
        return old

    def _aggregate(self, per_token: Tensor, tokens: TrainedTokens) -> tuple[Tensor, float]:
        return aggregate(per_token, tokens, self._common.aggregation, self._length_budget)

    def _add_kl(self, out: LossSums, tokens: TrainedTokens) -> None:
        if tokens.ref is None:
            assert self._kl_coef == 0, "algorithm.kl in the loss needs reference log-probs"
            return
        kl = kl_estimate(self._common.kl.kind, tokens.logprobs, tokens.ref)
        out.sums["kl"] = (kl.detach().sum(), float(kl.numel()))
        if self._kl_coef > 0:
            out.total = out.total + self._kl_coef * self._aggregate(kl, tokens)[0]

    def _add_entropy(self, out: LossSums, tokens: TrainedTokens) -> None:
        if tokens.entropy is None:
            assert not self.entropy_gradient, "algorithm.entropy_coef needs the entropy"
            return
        out.sums["entropy"] = (tokens.entropy.detach().sum(), float(tokens.entropy.numel()))
        if self.entropy_gradient:
            out.total = out.total - self._common.entropy_coef * self._aggregate(tokens.entropy, tokens)[0]


def likelihood_ratio(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)`, with log-ratios bounded at 20 either way."""
    return torch.exp(log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def cut_by_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Where a clip to `[1 - low, 1 + high]` takes the gradient away."""
    below = (ratio < 1 - low) & (advantages < 0)
    above = (ratio > 1 + high) & (advantages > 0)
    return {"clip_fraction/low": below, "clip_fraction/high": above, "clip_fraction": below | above}


def _surrogate_metrics(out: LossSums, surrogate: Surrogate) -> None:
    """How far the policy moved from the proximal one, and where that took the gradient away."""
    count = float(surrogate.loss.numel())
    out.sums |= {name: (where.sum(), count) for name, where in surrogate.cut.items()}
    if surrogate.ratio is not None:
        ratio = surrogate.ratio.detach()
        out.sums["ratio/mean"] = (ratio.sum(), count)
        if count:
            out.maxima["ratio/max"] = ratio.max()


def _advantage_metrics(out: LossSums, advantages: Tensor) -> None:
    count = float(advantages.numel())
    out.sums["advantage/mean"] = (advantages.sum(), count)
    out.sums["advantage/mean_square"] = (advantages.square().sum(), count)


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
