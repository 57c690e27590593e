"""Soft adaptive policy optimisation (Gao et al. 2025, https://arxiv.org/abs/2511.20347): a soft gate in place of the clip.

loss = -(4 / tau) sigmoid(tau (r - 1)) A;   tau differs for A > 0 and the rest;   at r = 1 the gradient is that of r A
"""

import torch
from torch import Tensor

from relax.algorithms.objective import TrainedTokens
from relax.algorithms.policy import PolicyObjective, Surrogate, likelihood_ratio
from relax.config.algorithm import SAPOConfig


class SAPO(PolicyObjective):
    """Per token."""

    def __init__(self, config: SAPOConfig, length_budget: int) -> None:
        super().__init__(config, length_budget)
        self._config = config

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        ratio = likelihood_ratio(tokens.logprobs - old)
        positive, other = ratio.new_tensor(self._config.tau_positive), ratio.new_tensor(self._config.tau_negative)
        tau = torch.where(advantages > 0, positive, other)
        gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
        return Surrogate(-gate * advantages, ratio)
