"""Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300): the group's mean is the baseline."""

import numpy as np

from relax.algorithms.estimate import RewardedRows, centred, group_index, spread
from relax.config.algorithm import GRPOConfig
from relax.types import Ragged

_EPS = 1e-6


def grpo(config: GRPOConfig, rows: RewardedRows) -> Ragged:
    """`(R - mean_g) / (std_g + 1e-6)` with the population's deviation; `R - mean_g` without `normalize_std`."""
    index, sizes = group_index(rows.group_ids)
    values = centred(rows.rewards, index, sizes)
    if config.normalize_std:
        std = np.sqrt(np.bincount(index, values**2, len(sizes)) / sizes)
        values = values / (std[index] + _EPS)
    return spread(values, rows.loss_mask)
