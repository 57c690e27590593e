"""Every algorithm is one line here: how rewards become advantages, and which objective is trained.

`algorithm.type` names the line. An estimator is a function `(config, rows) -> Ragged` on numpy arrays; an objective is a class
built from the configuration, called with flat tensors of trained tokens (`relax/algorithms/objective.py`), named by its
dotted path so that computing advantages does not load torch. The trainer knows neither: it adds up what the objective returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax.algorithms.dr_grpo import dr_grpo
from relax.algorithms.estimate import RewardedRows, check_rows
from relax.algorithms.grpo import grpo
from relax.algorithms.rloo import rloo
from relax.config.algorithm import AlgorithmConfig
from relax.types import Ragged

if TYPE_CHECKING:
    from relax.algorithms.objective import Objective


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`estimate(config, rows)` gives the advantages; `objective` is the dotted path of `Class(config, length_budget)`."""

    estimate: Callable[[Any, RewardedRows], Ragged]
    objective: str


_PPO_CLIP = "relax.algorithms.ppo_clip:PPOClip"

ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(grpo, _PPO_CLIP),
    "dr_grpo": Algorithm(dr_grpo, _PPO_CLIP),
    "rloo": Algorithm(rloo, _PPO_CLIP),
}


def advantages(
    config: AlgorithmConfig,
    *,
    rewards: NDArray[np.floating[Any]],
    group_ids: NDArray[np.int64],
    loss_mask: Ragged,
) -> Ragged:
    """Advantages of N rows that make up whole groups: ragged float32 with the lengths of `loss_mask`, 0 where it is 0.

    `rewards [N]`, computed in float64; `group_ids [N]` in any order. A row without a finite reward is a caller's mistake.
    """
    rows = RewardedRows(np.asarray(rewards, np.float64), np.asarray(group_ids, np.int64), loss_mask)
    check_rows(config, rows)
    return ALGORITHMS[config.type].estimate(config, rows)


def make_objective(config: AlgorithmConfig, *, length_budget: int) -> "Objective":
    """The objective of `config.type`. `length_budget` (tokens): the constant of `fixed_length` aggregation."""
    module, _, name = ALGORITHMS[config.type].objective.partition(":")
    objective: Objective = getattr(import_module(module), name)(config, length_budget)
    return objective
