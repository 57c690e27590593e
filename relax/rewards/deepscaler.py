"""The reward of DeepScaleR (Luo et al. 2025): the last box behind the thinking, compared as mathematics."""

from collections.abc import Callable
from typing import Any

from relax.config.reward import DeepscalerRewardConfig, MathRewardConfig
from relax.rewards.boxed import last_boxed
from relax.rewards.math import make_math
from relax.rewards.table import reference_texts

END_OF_THINKING = "</think>"


def make_deepscaler(config: DeepscalerRewardConfig) -> Callable[[Any, str, Any, dict[str, Any]], float]:
    """1.0 when what the last box behind the last `</think>` holds equals one of the row's answers; 0.0 without either."""
    is_equal = make_math(MathRewardConfig())

    def score(prompt: Any, response: str, answer: Any, metadata: dict[str, Any]) -> float:
        expected = reference_texts(answer, "deepscaler")
        _, found, text = response.rpartition(END_OF_THINKING)
        given = last_boxed(text) if found or not config.needs_think else None
        if not given:
            return 0.0
        return max(is_equal(prompt, f"\\boxed{{{given}}}", text, metadata) for text in expected)

    return score
