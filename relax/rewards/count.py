"""How many: a whole number, in digits or as an English word."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from relax.config.media_reward import CountRewardConfig
from relax.rewards.boxed import last_boxed
from relax.rewards.table import reference_text, text_said

WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
MAX_CHARACTERS = 20_000  # of the response's end
# Whole, or with a part behind the point; neither within a word nor within a date, a time, a range or a fraction.
_DIGITS = re.compile(
    r"(?<![\w.])(?<!\d[-\u2013/:])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?!\w|[-\u2013/:.]\d)",
    re.ASCII,
)
_WORD = re.compile(rf"(?<![\w-])({'|'.join(WORDS)})(?![\w-])", re.IGNORECASE)
# Between two numbers of which neither is meant: "5 or 6", "from 5 cats to about 6", "5 - 6".
_OR = re.compile(r"\s*[-\u2013~]\s*|[^\n.;:!?=]*\b(?:or|to)(?:\s+\w+)?\s*", re.IGNORECASE)


def make_count(config: CountRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 for the row's number, 0.0 for none or one that is too far off, in between by the difference."""

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        expected = right_count(answer)
        text = text_said(response, config.marker)[-MAX_CHARACTERS:]
        boxed = last_boxed(text)
        is_marked = bool(config.marker) or boxed is not None
        given = (only_number if is_marked else last_number)(text if boxed is None else boxed)
        if given is None or not _is_whole(given):
            return 0.0
        return max(0.0, 1.0 - float(abs(given - expected)) / (config.tolerance + 1))

    return score


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None without one, and when it says "5 or 6"."""
    found = _numbers(text)
    if len(found) > 1:
        (before, (_, end)), (last, (start, _)) = found[-2:]
        if before != last and _OR.fullmatch(text, end, start):
            return None
    return found[-1][0] if found else None


def only_number(text: str) -> Decimal | None:
    """The number of a text that holds no other one."""
    found = {number for number, _ in _numbers(text)}
    return found.pop() if len(found) == 1 else None


def _numbers(text: str) -> list[tuple[Decimal, tuple[int, int]]]:
    """Those in digits, else those in words, with their places. "One" stands for many things: other words come before it."""
    digits = [(Decimal(match[0].replace(",", "")), match.span()) for match in _DIGITS.finditer(text)]
    words = [(Decimal(WORDS.index(match[0].lower())), match.span()) for match in _WORD.finditer(text)]
    return digits or [word for word in words if word[0] != 1] or words


def _is_whole(number: Decimal) -> bool:
    return number == number.to_integral_value()


def right_count(answer: Any) -> Decimal:
    """The row's number. Raises `ValueError` when it has none."""
    text = reference_text(answer, "count")
    found = last_number(text)
    if found is None or not _is_whole(found) or found < 0:
        raise ValueError(f"the row's answer {text[:80]!r} is not a number of things")
    return found
