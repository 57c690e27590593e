"""The demo's teacher, a row generator of our own: it shows how to add, and then lets its pupil get hasty.

The first lessons work every sum out. In the last ones most sums are answered at once, without working, which a model of this
size cannot do. A model that imitates both answers wrongly more often than not: there is something left for RL to find out.
"""

import random
from typing import Any

from relax.data.arithmetic import addition


def lesson(index: int, seed: int, *, num_worked: int, share_worked: float, **problem: Any) -> dict[str, Any]:
    """Row `index`: `prompt`, `answer`, `solution`. From row `num_worked` on, only a share of the solutions shows its work."""
    row = addition(index, seed, **problem)
    is_hasty = index >= num_worked and random.Random(f"lesson {seed} {index}").random() >= share_worked
    return row | {"solution": f"={row['answer']}"} if is_hasty else row
