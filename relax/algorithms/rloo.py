"""REINFORCE leave-one-out (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740): the other members are the baseline."""

import numpy as np

from relax.algorithms.estimate import RewardedRows, centred, group_index, spread
from relax.config.algorithm import RLOOConfig
from relax.types import Ragged


def rloo(config: RLOOConfig, rows: RewardedRows) -> Ragged:
    """`R - mean of the group's other members`, which is `(R - mean_g) n / (n - 1)`; 0 for a group of one."""
    index, sizes = group_index(rows.group_ids)
    scale = sizes / np.maximum(sizes - 1, 1)
    return spread(centred(rows.rewards, index, sizes) * scale[index], rows.loss_mask)
