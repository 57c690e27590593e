"""`[algorithm.correction]`: the weight for the gap between the probabilities that sampled and those that train."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from relax.config.base import Section


class NoCorrectionConfig(Section):
    """No weight."""

    type: Literal["none"] = "none"
    """Name of the correction."""


class TISConfig(Section):
    """Truncated importance sampling: `min(w, cap)`."""

    type: Literal["tis"] = "tis"
    """Name of the correction."""
    cap: float = Field(2.0, gt=0)
    """Upper bound of the weight."""


class IcePopConfig(Section):
    """`w` inside `[low, high]`, 0 outside: tokens on which engine and trainer disagree teach nothing."""

    type: Literal["icepop"] = "icepop"
    """Name of the correction."""
    low: float = Field(0.5, ge=0)
    """Least weight that counts."""
    high: float = Field(5.0, gt=0)
    """Largest weight that counts."""

    @model_validator(mode="after")
    def _order(self) -> "IcePopConfig":
        _check_order(self.low, self.high)
        return self


class SequenceConfig(Section):
    """Drops whole samples: weight 1 where the geometric mean of `w` over a sample's tokens is inside `[low, high]`, else 0."""

    type: Literal["sequence"] = "sequence"
    """Name of the correction."""
    low: float = Field(0.99, ge=0)
    """Least geometric mean of a sample that counts."""
    high: float = Field(1.01, gt=0)
    """Largest geometric mean of a sample that counts."""

    @model_validator(mode="after")
    def _order(self) -> "SequenceConfig":
        _check_order(self.low, self.high)
        return self


class DecoupledConfig(Section):
    """Decoupled PPO: the ratio goes to recomputed log-probs, and `min(w, cap)` leads from them to the engine's."""

    type: Literal["decoupled"] = "decoupled"
    """Name of the correction."""
    cap: float = Field(5.0, gt=0)
    """Upper bound of the weight."""


CorrectionConfig = Annotated[
    NoCorrectionConfig | TISConfig | IcePopConfig | SequenceConfig | DecoupledConfig, Field(discriminator="type")
]


def _check_order(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"algorithm.correction.low = {low:g} must be below algorithm.correction.high = {high:g}")
