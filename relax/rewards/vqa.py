"""Open questions about pictures that several people answered, as in VQA (Antol et al. 2015, arXiv:1505.00468)."""

from collections.abc import Callable, Mapping
from typing import Any

from relax.config.media_reward import VqaRewardConfig
from relax.rewards.count import WORDS
from relax.rewards.f1 import words_of
from relax.rewards.table import text_said

ENOUGH = 3  # annotators who agree
_DIGITS = {word: str(number) for number, word in enumerate(WORDS)}


def make_vqa(config: VqaRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """`min(n / 3, 1)` with the `n` annotators who say the same, averaged over all ways to leave one of them out."""

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        given, answers = plain(text_said(response, config.marker)), annotators(answer)
        same = answers.count(given) if given else 0
        without_one_of_them, without_another = min((same - 1) / ENOUGH, 1.0), min(same / ENOUGH, 1.0)
        return (same * without_one_of_them + (len(answers) - same) * without_another) / len(answers)

    return score


def annotators(answer: Any) -> list[str]:
    """The row's answers in plain form, one for each person. Raises `ValueError` when they are too few to leave one out."""
    raw = [item.get("answer") if isinstance(item, Mapping) else item for item in answer] if isinstance(answer, list) else []
    texts = [plain(str(item)) for item in raw if item is not None]
    if len(texts) <= ENOUGH or not any(texts):
        raise ValueError(
            f'the row has {len(texts)} answers, and reward.type = "vqa" needs a list of {ENOUGH + 1} or more, one for each '
            'annotator (VQA has ten); "exact", "f1" and "ocr" take fewer'
        )
    return texts


def plain(text: str) -> str:
    """Without case, punctuation and articles, and with numbers in digits."""
    return " ".join(_DIGITS.get(word, word) for word in words_of(text))
