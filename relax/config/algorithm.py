"""`[algorithm]`: the estimator of the advantage and the objective, chosen by `algorithm.type`."""

from typing import Annotated, Literal

from pydantic import Field

from relax.config.base import Section


class KLConfig(Section):
    """KL term in the loss."""

    coef: float = Field(0.0, ge=0)
    """Weight of the KL term in the loss. Above 0 a reference role is started."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference: k1 = l - f, k2 = (l - f)^2 / 2, k3 = exp(f - l) - (f - l) - 1."""


class CorrectionConfig(Section):
    """Weight for the gap between the engine's and the trainer's probabilities, `w = exp(o - b)`, detached."""

    type: Literal["none", "tis"] = "none"
    """`tis` truncates the weight at `cap`; `none` leaves it out."""
    cap: float = Field(2.0, gt=0)
    """Upper bound of the weight."""


class PolicyGradientConfig(Section):
    """Settings that every policy-gradient algorithm shares."""

    clip_low: float = Field(0.2, ge=0)
    """Lower clip range of the ratio: not below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Upper clip range of the ratio: not above 1 + clip_high."""
    old_logprobs: Literal["rollout", "recompute", "current"] = "rollout"
    """Log-probs in the ratio's denominator: the engine's own, recomputed ones (starts actor_fwd), or the current ones."""
    kl: KLConfig = KLConfig()
    """KL to the reference policy."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""


class GRPOConfig(PolicyGradientConfig):
    """Group relative policy optimisation: a group's mean reward is the baseline."""

    type: Literal["grpo"] = "grpo"
    """Name of the algorithm."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over all trained tokens, or over each sample's tokens and then over samples."""


class DrGRPOConfig(PolicyGradientConfig):
    """GRPO without the division by the standard deviation, and with a constant length budget in place of the token count."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Name of the algorithm."""


class RLOOConfig(PolicyGradientConfig):
    """The mean reward of a group's other members is the baseline."""

    type: Literal["rloo"] = "rloo"
    """Name of the algorithm."""


AlgorithmConfig = Annotated[GRPOConfig | DrGRPOConfig | RLOOConfig, Field(discriminator="type")]
