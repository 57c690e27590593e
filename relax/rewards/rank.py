"""A response's rank within its group."""

from collections.abc import Mapping, Sequence

from relax.config.reward import RankRewardConfig
from relax.rewards.result import RewardResult
from relax.rewards.sum import WeightedSum
from relax.types import Prompt


class Rank:
    """The rank by the weighted sum of the parts: evenly from 0.0 for the lowest to 1.0 for the highest."""

    def __init__(self, config: RankRewardConfig) -> None:
        self._sum = WeightedSum(config)

    def wanted(self, prompt: Prompt) -> Sequence[str]:
        """All parts."""
        return self._sum.wanted(prompt)

    def combine(self, results: Mapping[str, Sequence[RewardResult]]) -> list[RewardResult]:
        """Equal responses share their mean rank, so a group of equals gets 0.5. Responses that failed have no rank, and the
        others are ranked without them. The sum is recorded as the part `sum`."""
        scored = self._sum.combine(results)
        values = [result.value for result in scored if result.value is not None]
        return [
            result
            if result.value is None
            else RewardResult(_rank(result.value, values), {**result.parts, "sum": result.value}, result.outcome)
            for result in scored
        ]


def _rank(value: float, values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.5
    lower = sum(other < value for other in values)
    equal = sum(other == value for other in values) - 1  # others than this one
    return (lower + equal / 2) / (len(values) - 1)
