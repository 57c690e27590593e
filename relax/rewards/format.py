"""Whether a response has the wanted form."""

import re
from collections.abc import Callable
from typing import Any

from relax.config.reward import FormatRewardConfig
from relax.errors import ConfigError


def make_format(config: FormatRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 when the regular expression matches the whole response, dots matching newlines too; else 0.0."""
    try:
        pattern = re.compile(config.pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.pattern = {config.pattern!r}: not a regular expression: {error}") from error

    def has_format(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        return float(pattern.fullmatch(response) is not None)

    return has_format
