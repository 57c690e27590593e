"""What the estimators see and share: the rewards of whole groups, and the trained tokens that they are spread over.

A *trajectory* is one rollout with one reward. It is one row, or several where its context was rewritten on the way; its trained
tokens are those of its rows, in order. Masked tokens do not exist here: nothing that they hold can leak into a number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatVector = NDArray[np.float64]
IndexVector = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Trajectories:
    """M trajectories that make up G whole groups, with S trained tokens, one trajectory's after another's.

    `rewards [M]` shaped; `groups [M]` from 0 to G - 1, in any order; `lengths [M]` trained tokens; `token_rewards [S]` what is
    added to the reward at each token (minus the KL where it belongs to the reward, else 0); `columns` float64 `[S]` by name.
    """

    rewards: FloatVector
    groups: IndexVector
    lengths: IndexVector
    token_rewards: FloatVector
    columns: Mapping[str, FloatVector]

    @property
    def sizes(self) -> FloatVector:
        """Members of each group `[G]`."""
        return np.bincount(self.groups).astype(np.float64)

    @property
    def totals(self) -> FloatVector:
        """Everything that a trajectory earned `[M]`: its reward and those of its tokens."""
        if not self.token_rewards.any():
            return self.rewards
        return self.rewards + np.bincount(self.owners, self.token_rewards, len(self.rewards))

    @property
    def owners(self) -> IndexVector:
        """The trajectory of each token `[S]`."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def spread(self, values: FloatVector) -> FloatVector:
        """One number a trajectory `[M]`, on each of its tokens `[S]`."""
        return np.repeat(values, self.lengths)

    def centred(self, values: FloatVector) -> FloatVector:
        """`values [M]` less their group's mean; exactly 0 where a group's are all equal, a group of one included."""
        index, sizes = self.groups, self.sizes
        means = np.bincount(index, values) / sizes
        low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
        np.minimum.at(low, index, values)
        np.maximum.at(high, index, values)
        # rounding of the mean would leave a tiny difference, which a division by the deviation blows up
        return np.where((low == high)[index], 0.0, values - means[index])

    def group(self, number: int) -> "Trajectories":
        """The members of one group alone."""
        mine = self.groups == number
        tokens = np.repeat(mine, self.lengths)
        return Trajectories(
            self.rewards[mine],
            np.zeros(int(mine.sum()), np.intp),
            self.lengths[mine],
            self.token_rewards[tokens],
            {name: column[tokens] for name, column in self.columns.items()},
        )


def discounted(values: FloatVector, lengths: IndexVector, factor: float) -> FloatVector:
    """`[S]`: each token's value plus `factor` times the result at the next token of its trajectory."""
    result = values.copy()
    ends = np.cumsum(lengths)
    by_length = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[by_length]
    for back in range(1, int(lengths.max(initial=0))):  # from the last tokens of all trajectories to the first, together
        longer = by_length[: np.searchsorted(-sorted_lengths, -back, "left")]
        here = ends[longer] - 1 - back
        result[here] += factor * result[here + 1]
    return result


def whitened(values: FloatVector) -> FloatVector:
    """`(values - mean) / (deviation + 1e-8)` over all of them; exactly 0 where all are equal."""
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    result: FloatVector = (values - values.mean()) / (values.std() + 1e-8)
    return result


# What an estimator gives: advantages `[S]`, or these together with other columns `[S]` by name.
Estimated = FloatVector | Mapping[str, FloatVector]


def as_columns(estimated: Any, num_tokens: int) -> dict[str, FloatVector]:
    """Columns by name. Raises `ValueError` for what has the wrong size, or is not a number that can be trained on."""
    columns = dict(estimated) if isinstance(estimated, Mapping) else {"advantages": estimated}
    checked = {}
    for name, column in columns.items():
        try:
            checked[name] = values = np.asarray(column, np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {type(column).__name__} is not an array of numbers") from error
        if values.shape != (num_tokens,):
            raise ValueError(f"{name} has shape {values.shape}, wanted ({num_tokens},), one number for each trained token")
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds a number that is not finite")
    return checked
