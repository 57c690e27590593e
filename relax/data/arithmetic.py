"""Addition problems with column-by-column working: the demo's task, small enough for a million-parameter model.

    prompt "57+86=?"   solution "31;41=143"   answer "143"

Each group of the solution is one column from the right: the digit of the sum, then the carry into the next column.
"""

import random
from typing import Any


def addition(
    index: int, seed: int, *, min_digits: int = 1, max_digits: int = 3, width: int = 0, suffix: str = "=?"
) -> dict[str, Any]:
    """Row `index` of the endless list that `seed` names: `prompt`, `answer` and `solution`, all texts.

    The longer operand has `min_digits` to `max_digits` digits, the other at most as many; operands are padded with zeros to
    `width` characters. The same `(index, seed)` gives the same row on every machine. Raises `ValueError` for a digit range
    that is empty.
    """
    if not 1 <= min_digits <= max_digits:
        raise ValueError(f"addition needs 1 <= min_digits <= max_digits, not min_digits={min_digits}, max_digits={max_digits}")
    rng = random.Random(f"addition {seed} {index}")  # seeded by the text's SHA-512, so that neighbours are unrelated
    digits = rng.randint(min_digits, max_digits)
    longer = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    other = rng.randrange(10**digits)
    left, right = (longer, other) if rng.random() < 0.5 else (other, longer)
    return {
        "prompt": f"{left:0{width}d}+{right:0{width}d}{suffix}",
        "answer": str(left + right),
        "solution": solution(left, right),
    }


def solution(left: int, right: int) -> str:
    """Column sums from the right as "digit carry", joined by ";", then "=" and the sum. Operands are not negative."""
    columns: list[str] = []
    carry, a, b = 0, left, right
    while a or b or not columns:
        carry, digit = divmod(a % 10 + b % 10 + carry, 10)
        columns.append(f"{digit}{carry}")
        a, b = a // 10, b // 10
    return f"{';'.join(columns)}={left + right}"
