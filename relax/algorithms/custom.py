"""Advantages from a function of the user's, one group at a time or all at once.

`function(given, **options)` gets `Trajectories` and returns float64 `[S]`, one number for each trained token:
`given.spread(values)` makes it from one number a trajectory. With `values` among `algorithm.needs` it returns a dictionary with
`advantages` and the critic's targets `returns`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from relax.algorithms.estimate import FloatVector, Trajectories, as_columns
from relax.config.algorithm import CustomConfig
from relax.data.dotted import load_function
from relax.errors import ConfigError

LARGEST = 1e15  # the square still fits into float32, in which losses and metrics are summed


def custom(config: CustomConfig, given: Trajectories) -> dict[str, FloatVector]:
    """What the function says. Raises `ConfigError` when there is none, it fails, or what it returns cannot be trained on."""
    function: Callable[..., Any] = load_function(config.path, "algorithm.path")
    names = ("advantages", "returns") if "values" in config.needs else ("advantages",)

    def call(part: Trajectories) -> dict[str, FloatVector]:
        try:
            found = as_columns(function(part, **config.options), int(part.lengths.sum()))
        except (Exception, SystemExit) as error:  # the function is the user's, and would fail again
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(f"algorithm.path = {config.path!r}: {said}") from error
        if large := [name for name in names if name in found and np.abs(found[name]).max(initial=0.0) > LARGEST]:
            raise ConfigError(f"algorithm.path = {config.path!r} returned {large[0]} beyond {LARGEST:g}: scale them down")
        if missing := [name for name in names if name not in found]:
            raise ConfigError(
                f"algorithm.path = {config.path!r} returned {', '.join(found)} without {', '.join(missing)}: with "
                f"algorithm.needs = {list(config.needs)} it returns a dictionary with {', '.join(names)}"
            )
        return {name: found[name] for name in names}

    if config.scope == "batch":
        return call(given)
    columns = {name: np.zeros(int(given.lengths.sum())) for name in names}
    groups_of_tokens = given.spread(given.groups.astype(np.float64))
    for number in range(len(given.sizes)):
        for name, values in call(given.group(number)).items():
            columns[name][groups_of_tokens == number] = values
    return columns
