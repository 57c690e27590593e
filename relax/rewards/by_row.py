"""The reward that the row itself names."""

from collections.abc import Mapping, Sequence

from relax.config.reward import ByRowRewardConfig
from relax.errors import RewardError
from relax.rewards.result import RewardResult
from relax.types import Prompt


class ByRow:
    """Scores a row's responses with the choice that its column names."""

    def __init__(self, config: ByRowRewardConfig) -> None:
        self._config = config

    def wanted(self, prompt: Prompt) -> Sequence[str]:
        """The one choice. Raises `RewardError` when the row names none, or one that there is not."""
        name = self.chosen(prompt.metadata)
        if name is None:
            raise RewardError(
                f"the row has no column {self._config.key!r}, and reward.default is unset: nothing says what scores it"
            )
        if name not in self._config.choices:
            known = ", ".join(self._config.choices)
            raise RewardError(f"the row has {self._config.key} = {name!r}, and reward.choices has {known}")
        return [name]

    def chosen(self, metadata: Mapping[str, object]) -> str | None:
        """The name in the row's column, or in its column `metadata`; else the default."""
        inner = metadata.get("metadata")
        name = metadata.get(self._config.key)
        if name is None and isinstance(inner, Mapping):
            name = inner.get(self._config.key)
        return self._config.default if name is None or name == "" else str(name)

    def combine(self, results: Mapping[str, Sequence[RewardResult]]) -> list[RewardResult]:
        """What the one choice gives."""
        return list(next(iter(results.values())))
