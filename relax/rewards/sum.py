"""The weighted sum of other rewards."""

from collections.abc import Mapping, Sequence

from relax.config.reward import SumRewardConfig
from relax.rewards.result import LARGEST_REWARD, RewardResult
from relax.types import Outcome, Prompt


class WeightedSum:
    """The sum of `weight * value` over all parts; a response for which one part failed has no sum."""

    def __init__(self, config: SumRewardConfig) -> None:
        self._weights = {name: config.weights.get(name, 1.0) for name in config.parts}

    def wanted(self, prompt: Prompt) -> Sequence[str]:
        """All parts."""
        return list(self._weights)

    def combine(self, results: Mapping[str, Sequence[RewardResult]]) -> list[RewardResult]:
        """Each response's sum. Recorded are the parts' values by name, and the parts of parts as `name.part`."""
        return [
            self._add(dict(zip(self._weights, row, strict=True)))
            for row in zip(*(results[name] for name in self._weights), strict=True)
        ]

    def _add(self, row: Mapping[str, RewardResult]) -> RewardResult:
        total, parts = 0.0, {}
        for name, result in row.items():
            if result.value is None:
                return RewardResult(None, {}, result.outcome, f"{name}: {result.error}")
            total += self._weights[name] * result.value
            parts[name] = result.value
            parts.update({f"{name}.{inner}": value for inner, value in result.parts.items()})
        if not abs(total) <= LARGEST_REWARD:
            return RewardResult.failed(f"the weighted sum is {total}")
        return RewardResult(total, parts, Outcome.OK)
