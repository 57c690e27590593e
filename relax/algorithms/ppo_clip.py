"""The clipped policy objective (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), with an optional dual clip.

loss = -min(r A, clip(r, 1 - low, 1 + high) A),   r = exp(l - o)

Dual clip (Ye et al. 2020, https://arxiv.org/abs/1912.09729): for A < 0 the objective is at least `dual_clip A`.
"""

import torch
from torch import Tensor

from relax.algorithms.objective import TrainedTokens
from relax.algorithms.policy import PolicyObjective, Surrogate, cut_by_clip, likelihood_ratio
from relax.config.algorithm import PPOClipConfig


class PPOClip(PolicyObjective):
    """Per token."""

    def __init__(self, config: PPOClipConfig, length_budget: int) -> None:
        super().__init__(config, length_budget)
        self._config = config

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        config = self._config
        ratio = likelihood_ratio(tokens.logprobs - old)
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        cut = cut_by_clip(ratio.detach(), advantages, config.clip_low, config.clip_high)
        if config.dual_clip is not None:
            bound = -config.dual_clip * advantages
            cut["clip_fraction/dual"] = (advantages < 0) & (loss.detach() > bound)
            cut["clip_fraction"] = cut["clip_fraction"] | cut["clip_fraction/dual"]
            loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
        return Surrogate(loss, ratio, cut)
