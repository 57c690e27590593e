"""`[reward]`: how a response is scored, chosen by `reward.type`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from relax.config.base import Section


class RewardSection(Section):
    """Settings that every reward shares: rewards run in worker processes that can be killed."""

    num_workers: int = Field(1, ge=1)
    """Worker processes."""
    time_limit_s: float = Field(10.0, gt=0)
    """Longest time of one call, in seconds; then the worker is killed and the sample's outcome is a reward error."""


class MathRewardConfig(RewardSection):
    """1 when the last boxed (or else the last plain) answer equals the row's answer, compared with math-verify."""

    type: Literal["math"] = "math"
    """Name of the reward."""


class ExactRewardConfig(RewardSection):
    """1 when the text after `marker` (the whole response without one) equals the row's answer."""

    type: Literal["exact"] = "exact"
    """Name of the reward."""
    marker: str = ""
    """The answer is what follows the last occurrence of this text; empty: the whole response."""
    ignore_case: bool = False
    """Compare without case."""


class FormatRewardConfig(RewardSection):
    """1 when the whole response matches a regular expression."""

    type: Literal["format"] = "format"
    """Name of the reward."""
    pattern: str
    """Regular expression that must match the whole response (dot matches newlines)."""


class ReasoningGymRewardConfig(RewardSection):
    """The score that reasoning-gym's own verifier gives; for data made by `data.type = "reasoning_gym"`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Name of the reward."""
    marker: str = ""
    """The answer is what follows the last occurrence of this text; empty: the whole response."""


class FunctionRewardConfig(RewardSection):
    """A function of your own."""

    type: Literal["function"] = "function"
    """Name of the reward."""
    path: str
    """Dotted path, `package.module:function`. Called as `f(prompt, response, answer, metadata)`, or with lists per group."""
    per_group: bool = False
    """Call once a group with the list of responses and expect a list of numbers."""
    options: dict[str, Any] = {}
    """Passed to the function as keyword arguments."""


RewardConfig = Annotated[
    MathRewardConfig | ExactRewardConfig | FormatRewardConfig | ReasoningGymRewardConfig | FunctionRewardConfig,
    Field(discriminator="type"),
]
