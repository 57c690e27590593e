"""`[critic]`: the model that says how much reward is still to come."""

from pydantic import Field

from relax.config.base import Section
from relax.config.model import ModelConfig


class CriticConfig(Section):
    """The critic of `algorithm.type = "ppo"`; its other settings are those of `[train]`."""

    model: ModelConfig | None = None
    """Weights that the critic begins with. The value head of a critic that `relax sft` trained, or of a reward model, is taken
    along; else it says 0 at first. Unset: those of `[model]`."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic; warm-up and schedule are those of `[train]`."""
    warmup_steps: int = Field(0, ge=0)
    """In the first steps, so many, the critic alone learns. They count, and the policy stays as it is."""
