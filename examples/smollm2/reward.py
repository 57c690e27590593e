"""Partial credit for a model that talks too much: a right sum counts, and counts more when nothing else is said."""

import re
from typing import Any


def short_sum(prompt: Any, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1.0 for the bare answer, 0.5 when it is the last of several words' numbers, 0.1 for any other number, else 0."""
    numbers = re.findall(r"\d+", response)
    if response.strip().rstrip(".") == answer:
        return 1.0
    if numbers and numbers[-1] == answer:
        return 0.5
    return 0.1 if numbers else 0.0
