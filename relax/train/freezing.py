"""Weights that training leaves as they are."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from relax.errors import ConfigError


def freeze(model: Any, patterns: Sequence[str], *, is_policy: bool = True) -> Any:
    """Turns gradients off for parameters of `model` whose names, or their ends after a dot, match one of `patterns`.

    Raises `ConfigError` for a pattern that matches nothing in the policy, and where nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = [name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not found and is_policy:  # a critic has no vocabulary head, and may be another model
            names = ", ".join(sorted({".".join(name.split(".")[:3]) for name in parameters})[:8])
            raise ConfigError(f"train.freeze: {pattern!r} matches no weight of the model; its names begin with {names}")
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"train.freeze = {list(patterns)!r} leaves nothing to train")
    return model
