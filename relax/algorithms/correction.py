"""Weights for the gap between the probabilities that sampled and those that train: `w = exp(o - b)`, detached.

| type | weight |
|---|---|
| `tis` | `min(w, cap)`: truncated importance sampling |
| `decoupled` | `min(w, cap)`, and the ratio goes to `o` (decoupled PPO, Hilton et al. 2022, https://arxiv.org/abs/2110.00641) |
| `icepop` | `w` inside `[low, high]`, else 0 (Ling team 2025, https://arxiv.org/abs/2510.18855) |
| `sequence` | 1 where the geometric mean of a sample's `w` lies inside `[low, high]`, else 0 |

Tokens of weight 0 stay in the count: the loss is an expectation over everything that was sampled.
"""

import torch
from torch import Tensor

from relax.algorithms.objective import LossSums, TrainedTokens
from relax.config.correction import CorrectionConfig, DecoupledConfig, IcePopConfig, SequenceConfig, TISConfig

# exp(20) is beyond every cap and bound that makes sense; without a limit it overflows
_MAX_LOG_WEIGHT = 20.0


def correction_weight(config: CorrectionConfig, old: Tensor, tokens: TrainedTokens) -> Tensor | None:
    """`[S]` weights; none when there is nothing to correct."""
    if config.type == "none":
        return None
    assert tokens.rollout is not None, f"algorithm.correction.type = {config.type!r} needs the engine's log-probs"
    gap = (old - tokens.rollout).detach()
    weight = torch.exp(gap.clamp(max=_MAX_LOG_WEIGHT))
    if isinstance(config, TISConfig | DecoupledConfig):
        return weight.clamp(max=config.cap)
    if isinstance(config, IcePopConfig):
        return torch.where((weight >= config.low) & (weight <= config.high), weight, 0.0)
    assert isinstance(config, SequenceConfig), config.type
    mean = torch.exp(tokens.sample_mean(gap).clamp(max=_MAX_LOG_WEIGHT))
    return ((mean >= config.low) & (mean <= config.high)).to(gap.dtype)


def add_correction_metrics(out: LossSums, config: CorrectionConfig, weight: Tensor, tokens: TrainedTokens) -> None:
    """Mean weight, and how much was cut at the cap, left out token by token, or dropped with its whole sample."""
    count, zeroed = float(weight.numel()), weight == 0
    out.sums["correction/weight"] = (weight.sum(), count)
    if isinstance(config, TISConfig | DecoupledConfig):
        out.sums["correction/capped_fraction"] = ((weight >= config.cap).sum(), count)
        return
    out.sums["correction/zeroed_fraction"] = (zeroed.sum(), count)
    has_tokens = tokens.lengths > 0
    dropped = has_tokens & (torch.bincount(tokens.sample[~zeroed], minlength=tokens.num_samples) == 0)
    out.sums["correction/dropped_samples"] = (dropped.sum(), float(has_tokens.sum()))
