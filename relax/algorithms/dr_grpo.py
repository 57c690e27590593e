"""Dr. GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783): no division by the deviation, a constant length budget.

The budget stands in the loss: `fixed_length` aggregation over `rollout.max_new_tokens`.
"""

from relax.algorithms.estimate import RewardedRows, centred, group_index, spread
from relax.config.algorithm import DrGRPOConfig
from relax.types import Ragged


def dr_grpo(config: DrGRPOConfig, rows: RewardedRows) -> Ragged:
    """`R - mean_g`."""
    index, sizes = group_index(rows.group_ids)
    return spread(centred(rows.rewards, index, sizes), rows.loss_mask)
