"""How many: a whole number, in digits or as an English word."""

import re
from collections.abc import Callable
from typing import Any

from relax.config.media_reward import CountRewardConfig
from relax.rewards.boxed import last_boxed
from relax.rewards.table import reference_text, text_said

WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
MAX_CHARACTERS = 20_000  # of the response's end
_DIGITS = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?![\w])", re.ASCII)
_WORD = re.compile(rf"(?<![\w-])({'|'.join(WORDS)})(?![\w-])", re.IGNORECASE)


def make_count(config: CountRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 for the row's number, 0.0 for none or one that is too far off, in between by the difference."""

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        expected = right_count(answer)
        text = text_said(response, config.marker)[-MAX_CHARACTERS:]
        boxed = last_boxed(text)
        given = last_number(text if boxed is None else boxed)
        if given is None or not given.is_integer():
            return 0.0
        return max(0.0, 1.0 - abs(given - expected) / (config.tolerance + 1))

    return score


def last_number(text: str) -> float | None:
    """The last number in digits, else the last one in words. "One" stands for many things, so other words come before it."""
    digits = _DIGITS.findall(text)
    if digits:
        return float(digits[-1].replace(",", ""))
    words = [WORDS.index(word.lower()) for word in _WORD.findall(text)]
    others = [number for number in words if number != 1]
    return float((others or words)[-1]) if words else None


def right_count(answer: Any) -> float:
    """The row's number. Raises `ValueError` when it has none."""
    text = reference_text(answer, "count")
    found = last_number(text)
    if found is None or not found.is_integer() or found < 0:
        raise ValueError(f"the row's answer {text[:80]!r} is not a number of things")
    return found
