"""Group relative policy optimisation (Shao et al. 2024, https://arxiv.org/abs/2402.03300): the group's mean is the baseline."""

from typing import Protocol

import numpy as np

from relax.algorithms.estimate import FloatVector, Trajectories

_EPS = 1e-6


class GroupNormalised(Protocol):
    """The setting of all algorithms with these advantages."""

    @property
    def normalize_std(self) -> bool: ...


def grpo(config: GroupNormalised, given: Trajectories) -> FloatVector:
    """`(R - mean_g) / (std_g + 1e-6)` with the population's deviation; `R - mean_g` without `normalize_std`."""
    values = given.centred(given.totals)
    if config.normalize_std:
        std = np.sqrt(np.bincount(given.groups, values**2) / given.sizes)
        values = values / (std[given.groups] + _EPS)
    return given.spread(values)
