"""What a regular expression finds, compared with the row's answer."""

import re
from collections.abc import Callable
from typing import Any

from relax.config.reward import RegexRewardConfig
from relax.errors import ConfigError
from relax.rewards.table import reference_texts


def make_regex(config: RegexRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 when the group of the last match is one of the row's answers, white space at both ends aside; else 0.0."""
    flags = re.DOTALL | (re.IGNORECASE if config.ignore_case else 0)
    try:
        pattern = re.compile(config.pattern, flags)
    except re.error as error:
        raise ConfigError(f"reward.pattern = {config.pattern!r}: not a regular expression: {error}") from error
    if "answer" not in pattern.groupindex and pattern.groups != 1:
        raise ConfigError(
            f"reward.pattern = {config.pattern!r}: it has {pattern.groups} groups; it needs one, or one named (?P<answer>...)"
        )
    group: str | int = "answer" if "answer" in pattern.groupindex else 1

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        expected = reference_texts(answer, "regex")
        found = None
        for match in pattern.finditer(response):
            found = match[group]
        given = (found or "").strip()
        if config.ignore_case:
            return float(given.casefold() in [text.casefold() for text in expected])
        return float(given in expected)

    return score
