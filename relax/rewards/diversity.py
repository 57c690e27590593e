"""How different the responses of a group are."""

from collections.abc import Callable, Sequence
from typing import Any

from relax.config.reward import DiversityRewardConfig
from relax.rewards.table import Scorer

MAX_WORDS = 20_000  # of a response's end


def make_diversity(config: DiversityRewardConfig) -> Scorer:
    """1 less the mean overlap (Jaccard index) of a response's runs of words with those of each other response of its group.

    0.0 for a response without words, for repetitions of another, and in a group of one, in which there is nothing to differ
    from. It says nothing of sense: junk differs too. So it belongs into a sum with a reward for being right.
    """

    def score(prompt: Any, responses: list[str], answer: Any, metadata: dict[str, Any]) -> list[float]:
        runs = [runs_of(response, config.num_words) for response in responses]
        return [_difference(mine, runs[:place] + runs[place + 1 :]) for place, mine in enumerate(runs)]

    score_group: Callable[[Any, Any, Any, dict[str, Any]], list[float]] = score
    return Scorer(score_group, per_group=True)


def runs_of(text: str, num_words: int) -> frozenset[tuple[str, ...]]:
    """All runs of `num_words` words; a shorter text is one run."""
    words = text.casefold().split()[-MAX_WORDS:]
    if 0 < len(words) < num_words:
        return frozenset({tuple(words)})
    return frozenset(tuple(words[start : start + num_words]) for start in range(len(words) - num_words + 1))


def _difference(mine: frozenset[tuple[str, ...]], others: Sequence[frozenset[tuple[str, ...]]]) -> float:
    if not mine or not others:
        return 0.0
    return 1.0 - sum(len(mine & other) / len(mine | other) for other in others) / len(others)
