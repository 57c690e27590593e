"""Text that was read from a picture: average normalised Levenshtein similarity, as in DocVQA (Mathew et al. 2021,
arXiv:2007.00398)."""

from collections.abc import Callable
from typing import Any

from relax.config.media_reward import OcrRewardConfig
from relax.rewards.edit_distance import edit_distance
from relax.rewards.table import text_said, written_texts


def make_ocr(config: OcrRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 less the distance to the nearest of the row's answers, as a share of the longer text; 0.0 from the threshold on."""

    def plain(text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if config.ignore_case else joined

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        expected = [plain(text) for text in written_texts(answer, "ocr")]
        given = plain(text_said(response, config.marker))
        nearest = min(distance(given, text) for text in expected)
        return 1.0 - nearest if nearest < config.threshold else 0.0

    return score


def distance(given: str, expected: str) -> float:
    """Edits over the longer text's length, from 0.0 to 1.0; `expected` is not empty."""
    if len(given) >= 10 * len(expected):
        return 1.0  # at least 0.9, and the time is bounded
    return edit_distance(expected, given) / max(len(given), len(expected))
