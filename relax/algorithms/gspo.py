"""Group sequence policy optimisation (Zheng et al. 2025, https://arxiv.org/abs/2507.18071): one ratio for each sequence.

s = exp(mean over the sequence of (l - o));   loss = -min(s A, clip(s, 1 - low, 1 + high) A), mean over sequences

The token form has the same value at every token, s_t = sg(s) exp(l_t - sg(l_t)), and lets each carry its own advantage.
"""

import torch
from torch import Tensor

from relax.algorithms.objective import TrainedTokens
from relax.algorithms.policy import PolicyObjective, Surrogate, cut_by_clip, likelihood_ratio
from relax.config.algorithm import GSPOConfig


class GSPO(PolicyObjective):
    """A sequence's loss stands on each of its tokens; the mean over them, then over sequences, is that of sequences."""

    def __init__(self, config: GSPOConfig, length_budget: int) -> None:
        super().__init__(config, length_budget)
        self._config = config

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        config, logprobs = self._config, tokens.logprobs
        ratio = likelihood_ratio(tokens.sample_mean(logprobs - old))
        if config.token_level:
            ratio = ratio.detach() * torch.exp(logprobs - logprobs.detach())
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        return Surrogate(loss, ratio, cut_by_clip(ratio.detach(), advantages, config.clip_low, config.clip_high))
