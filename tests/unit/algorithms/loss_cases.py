"""Every loss that can be trained, with settings that switch its parts on, and tokens to compute it on.

`CASES` goes through the table of algorithms: a new line has to name its settings here, and is then in every test.
"""

from dataclasses import dataclass, fields, replace

import torch

from relax.algorithms.likelihood import Likelihood
from relax.algorithms.objective import TrainedTokens, ValuedTokens
from relax.algorithms.scalar_losses import SCALAR_LOSSES
from relax.algorithms.table import ALGORITHMS, make_objective, make_value_loss
from relax.config import algorithm as a
from relax.config.algorithm import KLConfig
from relax.config.correction import DecoupledConfig, IcePopConfig, SequenceConfig, TISConfig

torch.set_num_threads(1)

BUDGET, TOP = 7, 3
KL, ENTROPY = {"kl": KLConfig(coef=0.3)}, {"entropy_coef": 0.2}
AGAIN = {"old_logprobs": "recompute"}
SETTINGS = {
    "grpo": [
        a.GRPOConfig(),
        a.GRPOConfig(aggregation="sequence_mean", dual_clip=1.5),
        a.GRPOConfig(**AGAIN, **KL, **ENTROPY, correction=TISConfig(cap=1.1)),
        a.GRPOConfig(**AGAIN, correction=IcePopConfig(low=0.8, high=1.2), aggregation="fixed_length"),
        a.GRPOConfig(**AGAIN, correction=SequenceConfig(low=0.9, high=1.15)),
        a.GRPOConfig(**AGAIN, correction=DecoupledConfig(cap=1.3), aggregation="sequence_mean"),
        a.GRPOConfig(old_logprobs="current"),
    ],
    "dr_grpo": [a.DrGRPOConfig(), a.DrGRPOConfig(old_logprobs="current", **KL, **ENTROPY, correction=TISConfig())],
    "rloo": [a.RLOOConfig(clip_low=0.1, clip_high=0.3), a.RLOOConfig(**AGAIN, kl=KLConfig(coef=1.0, kind="k2"))],
    "reinforce_pp": [a.ReinforcePPConfig(kl=a.RewardKLConfig(coef=0.5))],
    "reinforce_pp_baseline": [a.ReinforcePPBaselineConfig(kl=a.SquaredKLConfig(coef=0.5))],
    "ppo": [a.PPOConfig(), a.PPOConfig(dual_clip=3.0, kl=a.RewardKLConfig(coef=0.1, kind="k1", place="loss"))],
    "dapo": [a.DAPOConfig()],
    "gspo": [a.GSPOConfig(clip_low=0.05, clip_high=0.08), a.GSPOConfig(**AGAIN, **KL, token_level=True, clip_high=0.1)],
    "sapo": [a.SAPOConfig(), a.SAPOConfig(**AGAIN, **ENTROPY, tau_negative=2.0, aggregation="token_mean")],
    "cispo": [a.CISPOConfig(), a.CISPOConfig(**KL, clip_low=0.1, clip_high=0.1, aggregation="sequence_mean")],
    "reinforce": [a.ReinforceConfig(), a.ReinforceConfig(**AGAIN, correction=IcePopConfig(low=0.7, high=1.3))],
    "opd": [a.OPDConfig()],
    "opd_full": [
        a.OPDFullConfig(),
        a.OPDFullConfig(divergence="forward", aggregation="sequence_mean", **KL),
        a.OPDFullConfig(divergence="js", js_weight=0.3, correction=TISConfig(cap=1.2)),
    ],
    "custom": [a.CustomConfig(path="mine:f"), a.CustomConfig(path="mine:f", objective="reinforce", **AGAIN)],
    "value": [
        a.PPOConfig(),
        a.PPOConfig(value_clip=None, aggregation="sequence_mean"),
        a.PPOConfig(aggregation="fixed_length"),
    ],
    "sft": [None],
    **{name: [None] for name in SCALAR_LOSSES},
}
BESIDE = ("value", "sft", *SCALAR_LOSSES)  # the losses that no line of the table names


@dataclass(frozen=True)
class Case:
    name: str
    config: object

    def make(self):
        if self.name == "sft":
            return Likelihood()
        if self.name in SCALAR_LOSSES:
            return SCALAR_LOSSES[self.name]()
        make = make_value_loss if self.name == "value" else make_objective
        return make(self.config, length_budget=BUDGET)

    def tokens(self, lengths, seed=0):
        if self.name == "bradley_terry":
            return make_valued([2 * length for length in lengths], seed)  # pairs
        return (make_valued if self.name in ("value", *SCALAR_LOSSES) else make_tokens)(lengths, seed)


CASES = [Case(name, config) for name in (*ALGORITHMS, *BESIDE) for config in SETTINGS[name]]
POLICY_CASES = [case for case in CASES if case.name not in BESIDE]
LEAVES = ("logprobs", "entropy", "top", "values")


def case_id(case):
    names = [] if case.config is None else sorted(case.config.model_fields_set - {"type"})
    changed = {name: getattr(case.config, name) for name in names}
    shown = [getattr(value, "type", None) or getattr(value, "coef", value) for value in changed.values()]
    return "-".join(str(word) for word in (case.name, *shown))


def _normal(generator, *shape, scale=1.0, shift=0.0):
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + shift


def _samples(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), len(lengths)


def make_tokens(lengths, seed=0):
    """Float64 tokens of samples with `lengths` trained tokens each; `logprobs`, `entropy` and `top` are leaves."""
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)
    logprobs = _normal(generator, count, scale=0.5, shift=-1.5)

    def near(scale):
        return logprobs.detach() + _normal(generator, count, scale=scale)

    def top():
        return torch.log_softmax(_normal(generator, count, TOP + 4), -1)[:, :TOP]

    return TrainedTokens(
        logprobs.requires_grad_(),
        *_samples(lengths),
        advantages=_normal(generator, count),
        old=near(0.2),
        rollout=near(0.3),
        ref=near(0.4),
        entropy=_normal(generator, count, scale=0.3, shift=2.0).requires_grad_(),
        teacher=near(0.4),
        top=top().detach().requires_grad_(),
        top_teacher=top(),
    )


def make_valued(lengths, seed=0):
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)
    values = _normal(generator, count)
    old, returns = values + _normal(generator, count, scale=0.3), _normal(generator, count)
    return ValuedTokens(values.requires_grad_(), *_samples(lengths), old_values=old, returns=returns)


def leaves(tokens):
    """What gradients are taken of."""
    return [getattr(tokens, name) for name in LEAVES if getattr(tokens, name, None) is not None]


def part(tokens, first, last):
    """The samples `first` to `last - 1`, on the same leaves."""
    keep = (tokens.sample >= first) & (tokens.sample < last)
    names = [f.name for f in fields(tokens) if f.name not in ("sample", "num_samples")]
    columns = {name: getattr(tokens, name)[keep] for name in names if getattr(tokens, name) is not None}
    return replace(tokens, sample=tokens.sample[keep] - first, num_samples=last - first, **columns)


def gradients(total, tokens):
    """By leaf; zeros where a leaf takes no part."""
    found = torch.autograd.grad(total, leaves(tokens), allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves(tokens), found, strict=True)]
