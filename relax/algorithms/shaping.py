"""What is added to the reward before it becomes an advantage: punishment of overlong responses, penalties on length, KL."""

import numpy as np

from relax.algorithms.estimate import FloatVector, IndexVector
from relax.config.algorithm import ShapingConfig


def is_shaping(config: ShapingConfig) -> bool:
    """Whether the shaped reward is another one than the raw."""
    overlong = config.overlong_buffer > 0 and config.overlong_penalty > 0
    return overlong or (config.length_penalty != "none" and config.length_coef > 0)


def shaped(config: ShapingConfig, rewards: FloatVector, lengths: IndexVector, groups: IndexVector, longest: int) -> FloatVector:
    """Rewards `[M]` with length in them. `lengths [M]` in trained tokens, `groups [M]`, `longest`: unless the config says."""
    longest = config.max_length or longest
    result = rewards.astype(np.float64)
    if config.overlong_buffer:
        result = result - config.overlong_penalty * overlong(lengths, longest, config.overlong_buffer)
    if config.length_penalty == "linear":
        result = result - config.length_coef * lengths / longest
    elif config.length_penalty == "relative":
        result = result + config.length_coef * relative_length(rewards, lengths, groups)
    return result


def overlong(lengths: IndexVector, longest: int, buffer: float) -> FloatVector:
    """Soft overlong punishment (DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13), as a share from 0 to 1.

    0 up to `longest (1 - buffer)` tokens, then growing evenly to 1 at `longest`, and 1 beyond.
    """
    return np.clip((lengths - longest * (1 - buffer)) / (longest * buffer), 0.0, 1.0)


def relative_length(rewards: FloatVector, lengths: IndexVector, groups: IndexVector) -> FloatVector:
    """Length reward (Kimi k1.5, https://arxiv.org/abs/2501.12599, section 2.3.3): `0.5 - (length - min_g) / (max_g - min_g)`.

    At most 0 for a reward that is not above 0; 0 where all of a group are equally long.
    """
    num_groups = int(groups.max(initial=-1)) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, groups, lengths)
    np.maximum.at(high, groups, lengths)
    span = (high - low)[groups]
    bonus = np.where(span > 0, 0.5 - (lengths - low[groups]) / np.maximum(span, 1), 0.0)
    return np.where(rewards > 0, bonus, np.minimum(bonus, 0.0))


def kl_of_tokens(kind: str, policy: FloatVector, ref: FloatVector) -> FloatVector:
    """`[S]`: the estimators of `relax/algorithms/kl.py`, for the reward: no gradient, and the old policy's log-probs."""
    log_ratio = policy - ref
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    assert kind == "k3", kind
    return np.expm1(-log_ratio) + log_ratio
