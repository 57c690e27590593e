"""An algorithm's settings in words, for those who ask what a run file turns into."""

from relax.algorithms.table import ALGORITHMS
from relax.config.algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    CustomConfig,
    DAPOConfig,
    GRPOConfig,
    GSPOConfig,
    OPDFullConfig,
    PPOClipConfig,
    PPOConfig,
    ReinforceConfig,
    SAPOConfig,
)
from relax.config.correction import DecoupledConfig, IcePopConfig, SequenceConfig, TISConfig

NORMALISED = (GRPOConfig, DAPOConfig, GSPOConfig, SAPOConfig, CISPOConfig, ReinforceConfig)


def advantage_in_words(config: AlgorithmConfig) -> str:
    """Where a token's advantage comes from."""
    words = ALGORITHMS[config.type].advantage
    if isinstance(config, NORMALISED) and config.normalize_std:
        words = f"({words}) / standard deviation of its group"
    if isinstance(config, PPOConfig) and config.whiten:
        words += ", whitened over the step"
    if config.kl.coef > 0 and config.kl.place == "reward":
        words += f"; each token's reward less {config.kl.coef:g} x {config.kl.kind} to the reference"
    shaping = config.shaping
    if shaping.overlong_buffer:
        words += f"; the last {shaping.overlong_buffer:.0%} of the longest length cost up to {shaping.overlong_penalty:g}"
    if shaping.length_penalty != "none":
        words += f"; {shaping.length_penalty} length penalty x {shaping.length_coef:g}"
    return words


def loss_in_words(config: AlgorithmConfig) -> str:
    """What is minimised for each token, without KL and entropy."""
    words = _surrogate(config)
    match config.correction:
        case TISConfig(cap=cap) | DecoupledConfig(cap=cap):
            words += f"; weighted with min(trainer / engine probability, {cap:g})"
        case IcePopConfig(low=low, high=high):
            words += f"; weighted with trainer / engine probability, 0 outside [{low:g}, {high:g}]"
        case SequenceConfig(low=low, high=high):
            words += f"; without samples whose mean trainer / engine probability is outside [{low:g}, {high:g}]"
    return words


def mean_in_words(config: AlgorithmConfig, length_budget: int) -> str:
    """Over what the loss is averaged; `length_budget` is `rollout.max_new_tokens`."""
    return {
        "token_mean": "over all trained tokens of the step",
        "sequence_mean": "over each sample's tokens, then over the samples of the step",
        "fixed_length": f"sum over tokens / rollout.max_new_tokens ({length_budget}), mean over samples",
    }[config.aggregation]


def _surrogate(config: AlgorithmConfig) -> str:
    if isinstance(config, OPDFullConfig):
        return f"{config.divergence} divergence to the teacher, over its {config.top_k} likeliest tokens and the rest"
    if isinstance(config, CustomConfig) and ":" in config.objective:
        return f"what {config.objective} says"
    if isinstance(config, ReinforceConfig) or (isinstance(config, CustomConfig) and config.objective == "reinforce"):
        return "- advantage x log-prob"
    if config.old_logprobs == "current":
        return "- advantage x ratio, whose value is 1 (one update on each batch)"
    old = "the engine's own log-probs" if config.old_logprobs == "rollout" else "recomputed log-probs"
    if isinstance(config, SAPOConfig):
        gates = f"{config.tau_positive:g} and {config.tau_negative:g}"
        return f"- advantage x sigmoid of the ratio to {old}, of steepness {gates}"
    bounds = f"clipped to [{1 - config.clip_low:g}, {1 + config.clip_high:g}]"
    if isinstance(config, CISPOConfig) or (isinstance(config, CustomConfig) and config.objective == "cispo"):
        return f"- advantage x log-prob, weighted with the ratio to {old}, {bounds}"
    whose = "each sample's ratio" if isinstance(config, GSPOConfig) else "ratio"
    words = f"- min({whose} x advantage, clipped ratio x advantage); ratio to {old}, {bounds}"
    if isinstance(config, PPOClipConfig) and config.dual_clip is not None:
        words += f", at most {config.dual_clip:g} x |advantage|"
    return words
