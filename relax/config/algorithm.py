"""`[algorithm]`: how rewards become advantages, and what is maximised, chosen by `algorithm.type`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from relax.config.base import Section
from relax.config.correction import CorrectionConfig, DecoupledConfig, NoCorrectionConfig, TISConfig

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
TokenColumn = Literal["rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values"]


class KLConfig(Section):
    """KL divergence from the policy to the reference, in the loss or in the reward."""

    coef: float = Field(0.0, ge=0)
    """Weight of the KL term. Above 0 a reference role is started."""
    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference: k1 = l - f, k2 = (l - f)^2 / 2, k3 = exp(f - l) - (f - l) - 1."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the loss, with its gradient. `reward`: taken from the reward of each token, with the log-probs that
    `old_logprobs` names (the engine's for `current`) as `l`. Never both."""
    update_reference_every: int = Field(0, ge=0)
    """The reference takes the policy's weights every so many steps; 0 keeps the weights that the run began with."""


class RewardKLConfig(KLConfig):
    """KL divergence from the policy to the reference, in the reward unless set otherwise."""

    kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL to the reference: k1 = l - f, k2 = (l - f)^2 / 2, k3 = exp(f - l) - (f - l) - 1."""
    place: Literal["loss", "reward"] = "reward"
    """`reward`: taken from the reward of each token, with the log-probs that `old_logprobs` names (the engine's for `current`)
    as `l`. `loss`: a term of the loss, with its gradient. Never both."""


class SquaredKLConfig(KLConfig):
    """KL divergence from the policy to the reference, by its squared estimator unless set otherwise."""

    kind: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of the KL to the reference: k1 = l - f, k2 = (l - f)^2 / 2, k3 = exp(f - l) - (f - l) - 1."""


class ShapingConfig(Section):
    """Length in the reward. Filters and the metric `reward/mean` see the raw reward; advantages see the shaped one."""

    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Share of the longest length, at its end, over which `overlong_penalty` grows from 0 to all of it. 0: none."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What a response of the longest length loses."""
    length_penalty: Literal["none", "linear", "relative"] = "none"
    """`linear`: minus length / longest length. `relative`: from +0.5 for the shortest of a group to -0.5 for the longest, with
    no bonus where the raw reward is not above 0."""
    length_coef: float = Field(0.1, ge=0)
    """Weight of `length_penalty`."""
    max_length: int | None = Field(None, ge=1)
    """The longest length, in trained tokens of a sample. Unset: `rollout.max_new_tokens`."""


class OverlongShapingConfig(ShapingConfig):
    """Length in the reward, with the soft punishment of overlong responses unless set otherwise."""

    overlong_buffer: float = Field(0.2, ge=0, le=1)
    """Share of the longest length, at its end, over which `overlong_penalty` grows from 0 to all of it. 0: none."""


class PolicyGradientConfig(Section):
    """Settings that every algorithm shares."""

    is_clipped: ClassVar[bool] = True
    """Whether the ratio to the old policy bounds what a sample can do."""
    learns_from_any_policy: ClassVar[bool] = False
    """Whether the loss is right whoever wrote the samples."""
    compares_members: ClassVar[bool] = True
    """Whether a group of one teaches nothing."""

    old_logprobs: Literal["rollout", "recompute", "current"] = "rollout"
    """Log-probs in the ratio's denominator: the engine's own, recomputed ones (starts actor_fwd), or the current ones."""
    kl: KLConfig = KLConfig()
    """KL to the reference policy."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    correction: CorrectionConfig = NoCorrectionConfig()
    """Weight for the gap between the engine's and the trainer's probabilities, `w = exp(o - b)`, which carries no gradient."""
    aggregation: Aggregation = "token_mean"
    """Mean over all trained tokens; over each sample's tokens, then samples; or over samples, of the sum over tokens divided by
    `rollout.max_new_tokens`."""
    shaping: ShapingConfig = ShapingConfig()
    """Length in the reward."""

    @model_validator(mode="after")
    def _refuse_what_has_no_meaning(self) -> "PolicyGradientConfig":
        kind = self.correction.type
        if isinstance(self.correction, DecoupledConfig) and self.old_logprobs != "recompute":
            raise ValueError(
                'algorithm.correction.type = "decoupled" takes the ratio to recomputed log-probs: use algorithm.old_logprobs '
                f'= "recompute" (it is "{self.old_logprobs}")'
            )
        if kind != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f'algorithm.correction.type = "{kind}" weighs by exp(old - rollout log-probs), which is 1 with '
                f'algorithm.old_logprobs = "rollout": use "recompute" or "current", or correction.type = "none"'
            )
        return self


class RatioConfig(PolicyGradientConfig):
    """Settings of the algorithms that clip the ratio."""

    clip_low: float = Field(0.2, ge=0)
    """Lower clip range of the ratio: not below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Upper clip range of the ratio: not above 1 + clip_high."""


class PPOClipConfig(RatioConfig):
    """Settings of PPO's clipped objective."""

    dual_clip: float | None = Field(None, gt=1)
    """With a negative advantage A the objective is at least dual_clip x A, however large the ratio. Unset: no such bound."""


class GRPOConfig(PPOClipConfig):
    """Group relative policy optimisation: a group's mean reward is the baseline."""

    type: Literal["grpo"] = "grpo"
    """Name of the algorithm."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""


class DrGRPOConfig(PPOClipConfig):
    """GRPO without the division by the standard deviation, and with a constant length budget in place of the token count."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Name of the algorithm."""
    aggregation: Aggregation = "fixed_length"
    """Mean over samples, of the sum over tokens divided by `rollout.max_new_tokens`; over all trained tokens; or over each
    sample's tokens, then samples."""


class RLOOConfig(PPOClipConfig):
    """The mean reward of a group's other members is the baseline."""

    type: Literal["rloo"] = "rloo"
    """Name of the algorithm."""


class ReinforcePPConfig(PPOClipConfig):
    """REINFORCE++: the discounted reward to come of each token, whitened over all trained tokens of the step."""

    compares_members: ClassVar[bool] = False
    type: Literal["reinforce_pp"] = "reinforce_pp"
    """Name of the algorithm."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount for each trained token between a token and a reward."""
    kl: RewardKLConfig = RewardKLConfig()
    """KL to the reference policy."""


class ReinforcePPBaselineConfig(PPOClipConfig):
    """REINFORCE++ with a group's mean reward as baseline, whitened over all trained tokens of the step."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """Name of the algorithm."""
    kl: SquaredKLConfig = SquaredKLConfig()
    """KL to the reference policy."""


class PPOConfig(PPOClipConfig):
    """PPO with a critic: generalised advantage estimation over the trained tokens."""

    compares_members: ClassVar[bool] = False
    type: Literal["ppo"] = "ppo"
    """Name of the algorithm."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount for each trained token between a token and a reward."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """How far an advantage looks beyond the critic: 0 one token, 1 to the end of the sample."""
    whiten: bool = True
    """Whiten advantages over all trained tokens of the step."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far from its old value the critic's new one counts in its loss. Unset: any distance."""
    kl: RewardKLConfig = RewardKLConfig()
    """KL to the reference policy."""


class DAPOConfig(PPOClipConfig):
    """GRPO with a higher upper clip, a soft punishment of overlong responses, and groups with signal alone: with this type
    `rollout.filter_zero_signal` is true unless it is set."""

    type: Literal["dapo"] = "dapo"
    """Name of the algorithm."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    clip_high: float = Field(0.28, ge=0)
    """Upper clip range of the ratio: not above 1 + clip_high."""
    shaping: OverlongShapingConfig = OverlongShapingConfig()
    """Length in the reward."""


class GSPOConfig(RatioConfig):
    """GRPO's advantages with one ratio for each sequence: the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    """Name of the algorithm."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    clip_low: float = Field(3e-4, ge=0)
    """Lower clip range of the sequence's ratio: not below 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """Upper clip range of the sequence's ratio: not above 1 + clip_high."""
    token_level: bool = False
    """The token form: the value of the sequence's ratio with the gradient of each token's own, for advantages that differ
    between the tokens of a sample."""
    aggregation: Literal["sequence_mean"] = "sequence_mean"
    """Mean over each sample's tokens, then over samples."""


class SAPOConfig(PolicyGradientConfig):
    """GRPO's advantages with a soft gate in place of the clip: a sigmoid of the ratio."""

    type: Literal["sapo"] = "sapo"
    """Name of the algorithm."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate for positive advantages."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness of the gate for the others: the larger, the sooner a token that moved away loses its gradient."""
    aggregation: Aggregation = "sequence_mean"
    """Mean over each sample's tokens, then samples; over all trained tokens; or over samples, of the sum over tokens divided by
    `rollout.max_new_tokens`."""


class CISPOConfig(RatioConfig):
    """GRPO's advantages with a clipped ratio as a mere weight, so that no token loses its gradient."""

    type: Literal["cispo"] = "cispo"
    """Name of the algorithm."""
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    clip_low: float = Field(1.0, ge=0)
    """Lower clip range of the ratio: not below 1 - clip_low. 1: no lower bound."""
    clip_high: float = Field(4.0, ge=0)
    """Upper clip range of the ratio: not above 1 + clip_high."""


class ReinforceConfig(PolicyGradientConfig):
    """REINFORCE with a group's mean reward as baseline, and the weight of the correction in place of a ratio."""

    is_clipped: ClassVar[bool] = False
    type: Literal["reinforce"] = "reinforce"
    """Name of the algorithm."""
    normalize_std: bool = False
    """Divide by the group's standard deviation."""
    old_logprobs: Literal["rollout", "recompute", "current"] = "current"
    """Log-probs that the correction compares with the engine's: recomputed ones (starts actor_fwd), or the current ones. The
    engine's own (`rollout`) leave nothing to correct."""
    correction: CorrectionConfig = TISConfig()
    """Weight for the gap between the engine's and the trainer's probabilities, `w = exp(o - b)`, which carries no gradient."""


class OPDConfig(PPOClipConfig):
    """On-policy distillation: on the student's own tokens, the advantage is how much likelier the teacher finds them."""

    compares_members: ClassVar[bool] = False
    type: Literal["opd"] = "opd"
    """Name of the algorithm."""
    coef: float = Field(1.0, gt=0)
    """Weight of the teacher: the advantage is - coef (student's - teacher's log-prob)."""
    reward_coef: float = Field(0.0, ge=0)
    """Weight of the reward less its group's mean, added to the advantage."""


class OPDFullConfig(PolicyGradientConfig):
    """On-policy distillation as a loss: a divergence to the teacher's distribution at each of the student's own tokens."""

    learns_from_any_policy: ClassVar[bool] = True
    compares_members: ClassVar[bool] = False
    type: Literal["opd_full"] = "opd_full"
    """Name of the algorithm."""
    divergence: Literal["reverse", "forward", "js"] = "reverse"
    """KL(student || teacher), KL(teacher || student), or the Jensen-Shannon divergence, over the teacher's top-k tokens and one
    bucket for all others."""
    top_k: int = Field(16, ge=1)
    """How many of the teacher's most likely tokens are told apart at each place."""
    js_weight: float = Field(0.5, gt=0, lt=1)
    """The teacher's share of the mixture that the Jensen-Shannon divergence compares with."""
    old_logprobs: Literal["rollout", "recompute", "current"] = "current"
    """Log-probs that the correction compares with the engine's."""

    @model_validator(mode="after")
    def _refuse_what_no_loss_sees(self) -> "OPDFullConfig":
        if self.kl.place == "reward" or self.shaping != ShapingConfig():
            raise ValueError(
                'algorithm.type = "opd_full" learns from no reward: algorithm.shaping and algorithm.kl.place = "reward" have '
                'no effect; use algorithm.type = "opd" with reward_coef, or leave them out'
            )
        return self


class CustomConfig(PPOClipConfig):
    """Advantages from a function of yours; the objective is one of relax's, or yours as well."""

    compares_members: ClassVar[bool] = False
    type: Literal["custom"] = "custom"
    """Name of the algorithm."""
    path: str
    """The function, as `package.module:function`."""
    scope: Literal["group", "batch"] = "group"
    """`group`: called with one group at a time. `batch`: called once with all groups of a step."""
    needs: tuple[TokenColumn, ...] = ()
    """Columns that the function reads; the roles that make them are started. With `values` it returns the critic's targets as
    well: `{"advantages": ..., "returns": ...}`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    value_clip: float | None = Field(0.2, gt=0)
    """With `values`: how far from its old value the critic's new one counts in its loss. Unset: any distance."""
    objective: str = Field("ppo_clip", pattern=r"^(ppo_clip|cispo|reinforce|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """`ppo_clip`, `cispo`, `reinforce`, or a class of yours as `package.module:Class`."""


AlgorithmConfig = Annotated[
    GRPOConfig
    | DrGRPOConfig
    | RLOOConfig
    | ReinforcePPConfig
    | ReinforcePPBaselineConfig
    | PPOConfig
    | DAPOConfig
    | GSPOConfig
    | SAPOConfig
    | CISPOConfig
    | ReinforceConfig
    | OPDConfig
    | OPDFullConfig
    | CustomConfig,
    Field(discriminator="type"),
]


def policy_column(algorithm: PolicyGradientConfig) -> str:
    """The column of the old policy's log-probs, where no forward pass is at hand: the engine's are the current ones' equal."""
    return "old_logprobs" if algorithm.old_logprobs == "recompute" else "rollout_logprobs"


def needs_teacher(algorithm: PolicyGradientConfig) -> bool:
    """Whether a teacher has to score what the policy wrote."""
    is_custom = isinstance(algorithm, CustomConfig) and "teacher_logprobs" in algorithm.needs
    return isinstance(algorithm, OPDConfig | OPDFullConfig) or is_custom


# What a type means for other sections, where they leave it open.
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {"dapo": {"rollout": {"filter_zero_signal": True}}}


def with_preset(raw: Any) -> Any:
    """A run's raw sections, completed by the preset of `algorithm.type`; what is written stays."""
    algorithm = raw.get("algorithm") if isinstance(raw, Mapping) else None
    kind = algorithm.get("type") if isinstance(algorithm, Mapping) else getattr(algorithm, "type", None)
    sections = PRESETS.get(str(kind), {})
    completed = {}
    for name, values in sections.items():
        section = raw.get(name, {})
        completed[name] = {**values, **section} if isinstance(section, Mapping) else section
    return {**raw, **completed} if completed else raw


def fault_when_stale(algorithm: AlgorithmConfig) -> str | None:
    """What is wrong with this algorithm for samples of an older policy, and what would be right; none when nothing is."""
    is_own = isinstance(algorithm, CustomConfig) and ":" in algorithm.objective
    if algorithm.learns_from_any_policy or is_own or algorithm.correction.type != "none":
        return None
    is_clipped = algorithm.is_clipped and not (isinstance(algorithm, CustomConfig) and algorithm.objective == "reinforce")
    if not is_clipped:
        return (
            f'algorithm.type = "{algorithm.type}" with algorithm.correction.type = "none" takes stale samples for fresh ones: '
            'use rollout.max_staleness = 0, or algorithm.correction.type = "tis" with algorithm.old_logprobs = "current"'
        )
    if algorithm.old_logprobs == "current":
        return (
            'algorithm.old_logprobs = "current" has neither a clipped ratio nor a correction for stale samples: '
            'use rollout.max_staleness = 0, or algorithm.old_logprobs = "rollout", or algorithm.correction.type = "tis"'
        )
    return None
