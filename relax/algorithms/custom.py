"""Advantages from a function of the user's, one group at a time or all at once.

`function(given, **options)` gets `Trajectories` and returns float64 `[S]`, one number for each trained token:
`given.spread(values)` makes it from one number a trajectory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from relax.algorithms.estimate import FloatVector, Trajectories, as_columns
from relax.config.algorithm import CustomConfig
from relax.data.dotted import load_function


def custom(config: CustomConfig, given: Trajectories) -> FloatVector:
    """What the function says; raises `ConfigError` when there is no such function."""
    function: Callable[..., Any] = load_function(config.path, "algorithm.path")

    def call(part: Trajectories) -> FloatVector:
        return as_columns(function(part, **config.options), int(part.lengths.sum()), config.path)["advantages"]

    if config.scope == "batch":
        return call(given)
    advantages = np.zeros(int(given.lengths.sum()))
    groups_of_tokens = given.spread(given.groups.astype(np.float64))
    for number in range(len(given.sizes)):
        advantages[groups_of_tokens == number] = call(given.group(number))
    return advantages
