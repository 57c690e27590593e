"""What the estimators share: rewards compared within groups, and one scalar spread over a sample's own trained tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.types import Ragged

FloatVector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RewardedRows:
    """Rows of whole groups: `rewards [N]` float64, `group_ids [N]` int64, `loss_mask` ragged uint8."""

    rewards: FloatVector
    group_ids: NDArray[np.int64]
    loss_mask: Ragged


def group_index(group_ids: NDArray[np.int64]) -> tuple[NDArray[np.intp], FloatVector]:
    """`[N]` number of each row's group, and `[G]` sizes. Groups may have any size and lie interleaved."""
    _, index, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    return index.reshape(-1), counts.astype(np.float64)


def centred(rewards: FloatVector, index: NDArray[np.intp], sizes: FloatVector) -> FloatVector:
    """`R - mean_g` `[N]`; exactly 0 where all rewards of a group are equal, a group of one included."""
    means = np.bincount(index, rewards, len(sizes)) / sizes
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, index, rewards)
    np.maximum.at(high, index, rewards)
    # rounding of the mean would leave a tiny difference, which a division by the deviation blows up
    return np.where((low == high)[index], 0.0, rewards - means[index])


def spread(values: FloatVector, loss_mask: Ragged) -> Ragged:
    """One scalar a row `[N]` on the row's trained tokens, 0 elsewhere: ragged float32 with the mask's lengths."""
    rows = np.repeat(values.astype(np.float32), np.diff(loss_mask.offsets))
    return Ragged(np.where(loss_mask.values != 0, rows, np.float32(0)), loss_mask.offsets)


def check_rows(config: Any, rows: RewardedRows) -> None:
    """A row without a finite reward must not get here: only samples with a reward take part in a group's statistics."""
    assert len(rows.rewards) == len(rows.group_ids) == len(rows.loss_mask), "rewards, group ids and masks of the same rows"
    assert bool(np.isfinite(rows.rewards).all()), f"{config.type}: a row has no finite reward, drop it before"
