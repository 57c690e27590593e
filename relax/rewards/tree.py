"""Rewards made of rewards: a tree, whose leaves are computed in workers and whose inner nodes combine results here.

[reward] sum ---- right: by_row ---- maths: math     leaf 0
             |                  `--- words: f1       leaf 1
             `--- form: format                       leaf 2
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from relax.config.reward import RewardConfig, children
from relax.data.dotted import load_function
from relax.errors import RewardError
from relax.rewards.result import RewardResult
from relax.rewards.table import COMBINED
from relax.types import Prompt

ScoreLeaf = Callable[[int, Prompt, Sequence[str]], Awaitable[list[RewardResult]]]


class Combined(Protocol):
    """A reward made of others, which it knows by name."""

    def wanted(self, prompt: Prompt) -> Sequence[str]:
        """Names of the rewards that this prompt's responses need. Raises `RewardError` when the row does not tell."""

    def combine(self, results: Mapping[str, Sequence[RewardResult]]) -> list[RewardResult]:
        """One result for each response of the group, from those of each wanted reward. What failed stays failed."""


class RewardTree:
    """The tree of one `[reward]` section. `leaves`: their configurations, in the order of their numbers.

    >>> RewardTree(SumRewardConfig(parts={"right": "math", "form": {"type": "format", "pattern": ".*"}})).leaves
    [MathRewardConfig(...), FormatRewardConfig(...)]                                      # doctest: +SKIP
    """

    def __init__(self, config: RewardConfig) -> None:
        self.leaves: list[RewardConfig] = []
        self._shared = {"num_workers": config.num_workers, "time_limit_s": config.time_limit_s}
        self._root = self._grow(config)

    def _grow(self, config: RewardConfig) -> "int | _Node":
        if config.type not in COMBINED:
            self.leaves.append(config.model_copy(update=self._shared))
            return len(self.leaves) - 1
        combined: Any = load_function(COMBINED[config.type], "reward.type")(config)
        return _Node(combined, {name: self._grow(child) for name, child in children(config).items()})

    async def score(self, prompt: Prompt, responses: Sequence[str], score_leaf: ScoreLeaf) -> list[RewardResult]:
        """One result for each response. `score_leaf(number, prompt, responses)` gives those of one leaf."""
        return await self._score(self._root, prompt, responses, score_leaf)

    async def _score(
        self, node: "int | _Node", prompt: Prompt, responses: Sequence[str], score_leaf: ScoreLeaf
    ) -> list[RewardResult]:
        if isinstance(node, int):
            return await score_leaf(node, prompt, responses)
        try:
            names = node.combined.wanted(prompt)
        except RewardError as error:
            return [RewardResult.failed(f"{prompt.key}: {error}")] * len(responses)
        scoring = (self._score(node.children[name], prompt, responses, score_leaf) for name in names)
        return node.combined.combine(dict(zip(names, await asyncio.gather(*scoring), strict=True)))


class _Node:
    def __init__(self, combined: Combined, nodes: Mapping[str, "int | _Node"]) -> None:
        self.combined, self.children = combined, nodes
