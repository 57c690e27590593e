"""Error rate of a transcript by words or characters, for speech that was heard."""

import re
import unicodedata
from collections.abc import Callable
from typing import Any

from relax.config.media_reward import WerRewardConfig
from relax.rewards.edit_distance import edit_distance
from relax.rewards.table import text_said, written_texts

_APOSTROPHES = re.compile(r"(?<=\w)['\u2019](?=\w)")
_IN_NUMBER = re.compile(r"(?<=\d)[.,:](?=\d)")


def make_wer(config: WerRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 less the error rate against the best of the row's references; 0.0 from as many errors on as the reference is long."""

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        expected = references(config, answer)
        given = units(config, text_said(response, config.marker))
        return max(1.0 - error_rate(given, reference) for reference in expected)

    return score


def references(config: WerRewardConfig, answer: Any) -> list[list[str]]:
    """The row's references as words or characters. Raises `ValueError` for one in which nothing is left to compare."""
    found = [units(config, text) for text in written_texts(answer, "wer")]
    if not all(found):
        raise ValueError(f"the row's answer {str(answer)[:80]!r} has a reference of nothing but punctuation")
    return found


def error_rate(given: list[str], expected: list[str]) -> float:
    """Edits over the reference's length, from 0.0 to 1.0."""
    if len(given) >= 2 * len(expected):
        return 1.0  # what is too much is error enough; this also bounds the time
    return min(1.0, edit_distance(expected, given) / len(expected))


def units(config: WerRewardConfig, text: str) -> list[str]:
    """A text's words, or its characters without white space, in the form that is compared."""
    text = unicodedata.normalize("NFKC", text)
    text = text.casefold() if config.ignore_case else text
    text = _without_punctuation(text) if config.ignore_punctuation else text
    words = text.split()
    return words if config.unit == "word" else list("".join(words))


def _without_punctuation(text: str) -> str:
    """`Don't stop: 3.5!` as `Dont stop  3.5 `."""
    text = _APOSTROPHES.sub("", text)
    kept = {match.start() for match in _IN_NUMBER.finditer(text)}
    return "".join(
        character if index in kept or unicodedata.category(character)[0] not in "PS" else " "
        for index, character in enumerate(text)
    )
