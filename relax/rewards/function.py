"""A reward function of the user's own, by dotted path."""

import functools
import inspect
from typing import Any

from relax.config.reward import FunctionRewardConfig
from relax.data.dotted import load_function
from relax.errors import ConfigError
from relax.rewards.table import Scorer, is_async_function


def make_function(config: FunctionRewardConfig) -> Scorer:
    """Called as `f(prompt, response, answer, metadata, **reward.options)`; sync or async, per response or per group.

    Raises `ConfigError` when it cannot be imported or cannot be called with these arguments.
    """
    function = load_function(config.path, "reward.path")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None  # some built-in functions do not tell
    if signature is not None:
        try:
            signature.bind("prompt", "response", "answer", {}, **config.options)
        except TypeError as error:
            names = "".join(f", {name}=..." for name in config.options)
            second = "responses" if config.per_group else "response"
            raise ConfigError(
                f"reward.path = {config.path!r}: {function.__name__}{signature} is called as "
                f"f(prompt, {second}, answer, metadata{names}), which does not fit: {error}"
            ) from error
    bound: Any = functools.partial(function, **config.options) if config.options else function
    return Scorer(bound, per_group=config.per_group, is_async=is_async_function(function))
