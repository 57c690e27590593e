"""What an objective takes and gives.

An objective sees only the trained tokens of a micro-batch, flat, so that nothing masked can leak in, and returns a *sum* that
no count divides yet. Sums of micro-batches add up, in gradients and in metrics, whatever the split; the trainer divides the
gradient by the whole batch's count once, at the end of the optimizer step.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class SampledTokens(Protocol):
    """Tokens of samples, flat: `sample [S]` int64 is the sample (0 to `num_samples - 1`) that each belongs to."""

    @property
    def sample(self) -> Tensor: ...

    @property
    def lengths(self) -> Tensor:
        """Trained tokens of each sample, `[num_samples]`, in the data type of the loss."""
        ...


@dataclass(frozen=True)
class TrainedTokens:
    """The S trained tokens of a micro-batch, in the order of its samples. A sample never lies in two micro-batches.

    `logprobs [S]` float32 with a gradient; `sample [S]` int64, the sample (0 to `num_samples - 1`) that each token belongs to.
    The rest `[S]` float32 without gradients: `advantages`; `old` (proximal policy), `rollout` (as sampled), `ref` (reference)
    and `teacher` log-probs, none where the run has no such column; `entropy`, with a gradient if the objective asks for it.
    `top_teacher [S, K]`: log-probs of the teacher's most likely tokens, and `top [S, K]`, with a gradient, the policy's of the
    same tokens.
    """

    logprobs: Tensor
    sample: Tensor
    num_samples: int
    advantages: Tensor | None = None
    old: Tensor | None = None
    rollout: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None
    teacher: Tensor | None = None
    top: Tensor | None = None
    top_teacher: Tensor | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """Trained tokens of each sample, `[num_samples]` in the data type of `logprobs`."""
        return torch.bincount(self.sample, minlength=self.num_samples).to(self.logprobs.dtype)

    def sample_mean(self, values: Tensor) -> Tensor:
        """On each token `[S]`, the mean of `values [S]` over the trained tokens of its sample."""
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample, values)
        return (sums / self.lengths.clamp(min=1))[self.sample]


@dataclass(frozen=True)
class ValuedTokens:
    """The S trained tokens of a micro-batch as a critic or a reward model sees them.

    `values [S]` float32 with a gradient: what the model says of what stands before each token, which knows no temperature;
    `sample [S]` as in `TrainedTokens`. `returns [S]`: the targets; `old_values [S]`: what the advantages were computed with,
    if there are any.
    """

    values: Tensor
    sample: Tensor
    num_samples: int
    returns: Tensor
    old_values: Tensor | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """Trained tokens of each sample, `[num_samples]` in the data type of `values`."""
        return torch.bincount(self.sample, minlength=self.num_samples).to(self.values.dtype)


@dataclass
class LossSums:
    """`total`: un-normalised loss, a scalar with a graph; `count`: what the whole batch's totals are divided by.

    `sums`: metrics as (sum, count); `maxima`: metrics of which the largest counts. Both hold detached scalars, read once.
    """

    total: Tensor
    count: float
    sums: dict[str, tuple[Tensor, float]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """Built as `Class(config, length_budget)`."""

    entropy_gradient: bool
    """Whether the entropy takes part in the loss."""

    zero_without_advantage: bool
    """Whether a sample whose advantages are all 0 has no gradient, so that its backward pass can be left out."""

    def __call__(self, tokens: TrainedTokens) -> LossSums: ...


def aggregate(per_token: Tensor, tokens: SampledTokens, how: str, length_budget: int) -> tuple[Tensor, float]:
    """(un-normalised sum, count) of `per_token [S]`, so that sum over count, each added over micro-batches, is

    - `token_mean`: the mean over all trained tokens;
    - `sequence_mean`: the mean over samples of the mean over each one's tokens;
    - `fixed_length`: the mean over samples of the sum over each one's tokens, divided by `length_budget`.

    Samples without trained tokens do not count.
    """
    if how == "token_mean":
        return per_token.sum(), float(per_token.numel())
    num_samples = float((tokens.lengths > 0).sum())
    if how == "sequence_mean":
        return (per_token / tokens.lengths[tokens.sample]).sum(), num_samples
    assert how == "fixed_length", how
    return per_token.sum() / length_budget, num_samples
