"""Pairs to learn the demo's task from: a sum that is right, and the same with mistakes, as the demo's policy makes them.

    prompt "57+86=?"   chosen "7613;5814=143"   rejected "7612;5814=142", or "7613;5815=153", "7614;5813=134", ...

A mistake is a column that is added up wrongly; the columns and the sum behind it agree with it.
"""

import random
from typing import Any

from examples.arithmetic.lessons import lesson


def pair(index: int, seed: int, **options: Any) -> dict[str, Any]:
    """Row `index` of the list that `seed` names: `prompt`, `chosen` and `rejected`. `options` are those of `addition`."""
    row = lesson(index, seed, **options)
    columns = row["solution"].partition("=")[0].split(";")
    rng = random.Random(f"mistakes {seed} {index}")
    kinds = (-1, 1) if rng.random() < 0.5 else tuple(range(1, 20))  # those of the policy, and coarser ones to begin with
    faults = [rng.choice(kinds) * rng.randint(0, 1) for _ in columns]
    faults[rng.randrange(len(columns))] = rng.choice(kinds)  # one at least
    return {"prompt": row["prompt"], "chosen": row["solution"], "rejected": _with(faults, columns)}


def _with(faults: list[int], columns: list[str]) -> str:
    """The working of `columns`, each of which comes out wrong by its fault, and the sum of that."""
    made, carry, digits = [], 0, ""
    for column, fault in zip(columns, faults, strict=True):
        total = (int(column[0]) + int(column[1]) + carry + fault) % 20
        made.append(f"{column[:2]}{total:02d}")
        carry, digits = total // 10, f"{total % 10}{digits}"
    return f"{';'.join(made)}={int(f'{carry}{digits}')}"
