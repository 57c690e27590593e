"""From rows to advantages: rewards shaped, trained tokens picked out, the estimator called, its numbers put back in place."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.algorithms.estimate import FloatVector, IndexVector, Trajectories, as_columns
from relax.algorithms.shaping import is_shaping, kl_of_tokens, shaped
from relax.algorithms.table import ALGORITHMS, estimator_columns
from relax.config.algorithm import AlgorithmConfig, policy_column
from relax.types import Column, Ragged


def advantages(
    config: AlgorithmConfig, columns: Mapping[str, Column], *, group_ids: NDArray[np.int64], length_budget: int
) -> dict[str, Column]:
    """The columns that the estimator makes of N rows of whole groups, of a whole step where `is_whole_batch`.

    Given: `reward [N]`, the raw one, finite in every row; `loss_mask` ragged; what `estimator_columns` names, ragged, of which
    only trained tokens are read; `group_ids [N]` in any order; `length_budget`: the longest response, in tokens. Where the run
    has them: `trajectory [N]`, equal for rows of a group that are parts of one rollout, which share a reward and lie in order;
    `num_sampled [N]`, the tokens that the policy wrote, for shaping: without it, the trained ones.

    Made: `advantages`, and `returns` with a critic, ragged float32 with the mask's lengths and 0 where it is 0; and
    `shaped_reward [N]` float64 where length changes the reward. All is computed in float64.
    """
    rows = _Rows(config, columns, np.asarray(group_ids, np.int64))
    given = rows.trajectories(config, columns)
    result: dict[str, Column] = {}
    if is_shaping(config.shaping):
        rewards = shaped(config.shaping, given.rewards, rows.num_sampled(columns), given.groups, length_budget)
        given = Trajectories(rewards, given.groups, given.lengths, given.token_rewards, given.columns)
        result["shaped_reward"] = rewards[rows.trajectory]
    estimate = ALGORITHMS[config.type].estimate
    assert estimate is not None, f"{config.type} has no advantages"
    for name, values in as_columns(estimate(config, given), len(rows.tokens)).items():
        flat = np.zeros(len(rows.mask.values), np.float32)
        flat[rows.tokens] = values
        result[name] = Ragged(flat, rows.mask.offsets)
    return result


class _Rows:
    """`trajectory [N]`: the number of each row's; `tokens [S]`: places of trained tokens, one trajectory's after another's."""

    def __init__(self, config: AlgorithmConfig, columns: Mapping[str, Column], group_ids: NDArray[np.int64]) -> None:
        self.mask, self._group_ids = ragged(columns, "loss_mask"), group_ids
        self._rewards = np.asarray(columns["reward"], np.float64)
        assert len(self._rewards) == len(group_ids) == len(self.mask), "rewards, group ids and masks of the same rows"
        assert bool(np.isfinite(self._rewards).all()), f"{config.type}: a row has no finite reward, drop it before"
        self.trajectory, self._first_rows = _number(group_ids, columns.get("trajectory"))
        rows_of_tokens = np.repeat(np.arange(len(self.mask)), np.diff(self.mask.offsets))
        trained = np.flatnonzero(self.mask.values)
        owners = self.trajectory[rows_of_tokens[trained]]
        order = np.argsort(owners, kind="stable")
        self.tokens: IndexVector = trained[order]
        self._lengths: IndexVector = np.bincount(owners, minlength=len(self._first_rows))

    def trajectories(self, config: AlgorithmConfig, columns: Mapping[str, Column]) -> Trajectories:
        """What the estimator sees, before shaping."""
        values = {name: self._of_tokens(columns, name) for name in estimator_columns(config)}
        token_rewards = np.zeros(len(self.tokens))
        if config.kl.coef > 0 and config.kl.place == "reward":
            token_rewards = -config.kl.coef * kl_of_tokens(
                config.kl.kind, values[policy_column(config)], values["ref_logprobs"]
            )
        _, groups = np.unique(self._group_ids[self._first_rows], return_inverse=True)
        rewards = self._rewards[self._first_rows]
        assert bool((rewards[self.trajectory] == self._rewards).all()), "rows of one trajectory have different rewards"
        return Trajectories(rewards, groups.reshape(-1), self._lengths, token_rewards, values)

    def num_sampled(self, columns: Mapping[str, Column]) -> IndexVector:
        """Tokens that the policy wrote in each trajectory `[M]`, trained or not."""
        if "num_sampled" not in columns:
            return self._lengths
        counts = np.asarray(columns["num_sampled"], np.float64)
        return np.bincount(self.trajectory, counts, len(self._first_rows)).astype(np.intp)

    def _of_tokens(self, columns: Mapping[str, Column], name: str) -> FloatVector:
        values = ragged(columns, name).values[self.tokens].astype(np.float64)
        assert bool(np.isfinite(values).all()), f"column {name!r}: a trained token has no finite number"
        return values


def _number(group_ids: NDArray[np.int64], given: Column | None) -> tuple[IndexVector, IndexVector]:
    """The number of each row's trajectory `[N]`, and the first row of each trajectory `[M]`."""
    if given is None:
        every: IndexVector = np.arange(len(group_ids))
        return every, every
    pairs: NDArray[Any] = np.stack((group_ids, np.asarray(given, np.int64)), 1)
    _, first, numbers = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    return numbers.reshape(-1), first


def ragged(columns: Mapping[str, Column], name: str) -> Ragged:
    """A per-token column; it has to be there."""
    column = columns.get(name)
    assert isinstance(column, Ragged), f"{name!r} is not among the columns of tokens: {sorted(columns)}"
    return column
