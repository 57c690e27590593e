"""Dr. GRPO (Liu et al. 2025, https://arxiv.org/abs/2503.20783): no division by the deviation, a constant length budget.

The budget stands in the loss: `fixed_length` aggregation over `rollout.max_new_tokens`.
"""

from relax.algorithms.estimate import FloatVector, Trajectories
from relax.config.algorithm import DrGRPOConfig


def dr_grpo(config: DrGRPOConfig, given: Trajectories) -> FloatVector:
    """`R - mean_g`."""
    return given.spread(given.centred(given.totals))
