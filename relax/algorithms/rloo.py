"""REINFORCE leave-one-out (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740): the other members are the baseline."""

import numpy as np

from relax.algorithms.estimate import FloatVector, Trajectories
from relax.config.algorithm import RLOOConfig


def rloo(config: RLOOConfig, given: Trajectories) -> FloatVector:
    """`R - mean of the group's other members`, which is `(R - mean_g) n / (n - 1)`; 0 for a group of one."""
    scale = given.sizes / np.maximum(given.sizes - 1, 1)
    return given.spread(given.centred(given.totals) * scale[given.groups])
