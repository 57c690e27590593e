"""Overlap of words with the row's answer, as in SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250)."""

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from relax.config.reward import F1RewardConfig
from relax.rewards.table import reference_texts, text_after

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def make_f1(config: F1RewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], dict[str, float]]:
    """The best F1 over the row's answers, from 0.0 to 1.0; the part `exact` says whether all words are the same, in order."""

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> dict[str, float]:
        expected = [words_of(text) for text in reference_texts(answer, "f1")]
        given = words_of(text_after(response, config.marker) or "")
        return {
            "reward": max(f1(given, words) for words in expected),
            "exact": float(bool(given) and given in expected),
        }

    return score


def words_of(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles. An answer of nothing else (`A`, `+`) keeps what it has."""
    folded = text.lower()
    plain = _ARTICLES.sub(" ", folded.translate(_PUNCTUATION)).split()
    return plain or folded.split()


def f1(given: list[str], expected: list[str]) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it occurs; 0.0 without any in common."""
    common = sum((Counter(given) & Counter(expected)).values())
    return 2 * common / (len(given) + len(expected)) if common else 0.0
