"""Clipped importance sampling policy optimisation (MiniMax-M1, https://arxiv.org/abs/2506.13585): the ratio is a mere weight.

loss = -sg(clip(r, 1 - low, 1 + high)) A l: the clip bounds how much a token counts, and takes no gradient away
"""

from torch import Tensor

from relax.algorithms.objective import TrainedTokens
from relax.algorithms.policy import PolicyObjective, Surrogate, likelihood_ratio
from relax.config.algorithm import RatioConfig


class CISPO(PolicyObjective):
    """Per token."""

    def __init__(self, config: RatioConfig, length_budget: int) -> None:
        super().__init__(config, length_budget)
        self._config = config

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        low, high = 1 - self._config.clip_low, 1 + self._config.clip_high
        ratio = likelihood_ratio(tokens.logprobs.detach() - old)
        loss = -ratio.clamp(low, high) * advantages * tokens.logprobs
        below, above = ratio < low, ratio > high
        bounded = {"bounded_fraction/low": below, "bounded_fraction/high": above, "bounded_fraction": below | above}
        return Surrogate(loss, ratio, bounded)
