"""REINFORCE++ (Hu 2025, https://arxiv.org/abs/2501.03262): no group is needed, the whole batch is the measure."""

import numpy as np

from relax.algorithms.estimate import FloatVector, Trajectories, discounted, whitened
from relax.config.algorithm import ReinforcePPBaselineConfig, ReinforcePPConfig


def reinforce_pp(config: ReinforcePPConfig, given: Trajectories) -> FloatVector:
    """The discounted return of each token, from its token rewards and the reward at the end, whitened over the batch."""
    return whitened(discounted(with_terminal(given), given.lengths, config.gamma))


def reinforce_pp_baseline(config: ReinforcePPBaselineConfig, given: Trajectories) -> FloatVector:
    """`R - mean_g` on each token, whitened over the batch."""
    return whitened(given.spread(given.centred(given.totals)))


def with_terminal(given: Trajectories) -> FloatVector:
    """Rewards `[S]`: those of the tokens, and the trajectory's own at its last trained token."""
    rewards = given.token_rewards.copy()
    speaks = given.lengths > 0
    rewards[np.cumsum(given.lengths)[speaks] - 1] += given.rewards[speaks]
    return rewards
