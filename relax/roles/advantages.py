"""The columns `advantages` (and `returns`, `shaped_reward`): rewards become one number for each trained token."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from relax.algorithms.advantages import advantages
from relax.algorithms.table import estimator_columns, made_columns
from relax.config.run import RunConfig
from relax.roles.columns import ColumnMaker
from relax.roles.rows import taught
from relax.train.backend import NO_FEATURES, GroupFeatures
from relax.types import Column


class Advantages(ColumnMaker):
    """Groups may come in any number and order, unless the algorithm is one of whole batches: then all of a step at once."""

    max_groups = 256  # they are cheap

    def __init__(self, config: RunConfig) -> None:
        self._algorithm, self._longest = config.algorithm, config.rollout.max_new_tokens
        self.columns = made_columns(config.algorithm)
        self.needs = ("reward", "loss_mask", "num_sampled", *estimator_columns(config.algorithm))

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        return advantages(self._algorithm, taught(columns), group_ids=group_ids, length_budget=self._longest)
