"""The demo's lessons, a row generator of our own: sums with their working written so that a tiny model can follow it.

    prompt "57+86=?"   solution "7613;5814=143"   answer "143"

One group of the working is one column, from the right: the two digits, and what they add up to with the carry. Copying the
digits down is what makes it easy to learn: each token of the working depends on a few others only.
"""

from typing import Any

from relax.data.arithmetic import addition


def lesson(index: int, seed: int, **options: Any) -> dict[str, Any]:
    """Row `index` of the list that `seed` names: `prompt`, `answer` and `solution`. `options` are those of `addition`."""
    row = addition(index, seed, **options)
    left, right = (int(number) for number in row["prompt"].rstrip("=?").split("+"))
    return row | {"solution": f"{working(left, right)}={row['answer']}"}


def working(left: int, right: int) -> str:
    """The columns of the sum of two numbers that are not negative."""
    columns: list[str] = []
    carry = 0
    while left or right or not columns:
        total = left % 10 + right % 10 + carry
        columns.append(f"{left % 10}{right % 10}{total:02d}")
        left, right, carry = left // 10, right // 10, total // 10
    return ";".join(columns)
