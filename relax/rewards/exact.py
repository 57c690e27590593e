"""Exact comparison with the row's answer."""

from collections.abc import Callable
from typing import Any

from relax.config.reward import ExactRewardConfig
from relax.rewards.table import reference_text, text_after


def make_exact(config: ExactRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 when the text after the last marker is the answer, white space at both ends aside; else 0.0."""

    def exact(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        expected, given = reference_text(answer, "exact"), text_after(response, config.marker)
        if given is not None and config.ignore_case:
            expected, given = expected.casefold(), given.casefold()
        return float(given == expected)

    return exact
