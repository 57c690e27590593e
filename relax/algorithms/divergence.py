"""On-policy distillation as a loss: the divergence of student and teacher at each token that the student wrote.

Over the teacher's K most likely tokens and one bucket for all others; p student, q teacher, m = b q + (1 - b) p:

reverse  sum p (log p - log q)     forward  sum q (log q - log p)     js  b KL(q || m) + (1 - b) KL(p || m)

A bucket only joins what it holds: no divergence is larger over it than over the whole vocabulary.
"""

import torch
from torch import Tensor

from relax.algorithms.objective import TrainedTokens
from relax.algorithms.policy import PolicyObjective, Surrogate
from relax.config.algorithm import OPDFullConfig

_NOTHING = -1e4  # the log of a probability that is 0 in any precision, and finite
_LEAST = 1e-8  # of the rest bucket: rounding may leave nothing, or less


class Divergence(PolicyObjective):
    """Per token, whatever the advantages."""

    needs_advantages = False

    def __init__(self, config: OPDFullConfig, length_budget: int) -> None:
        super().__init__(config, length_budget)
        self._config = config

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        assert tokens.top is not None, "no log-probs of the teacher's tokens"
        assert tokens.top_teacher is not None, "no top-k log-probs of a teacher"
        empty = tokens.top_teacher.isneginf()  # a token that the policy has not: it belongs to the bucket
        student, teacher = (with_rest(top.masked_fill(empty, _NOTHING)) for top in (tokens.top, tokens.top_teacher))
        return Surrogate(divergence(self._config.divergence, student, teacher, self._config.js_weight))


def with_rest(logprobs: Tensor) -> Tensor:
    """`[S, K]` to `[S, K + 1]`: the last is the log of what the others leave of the probability."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_LEAST)
    return torch.cat((logprobs, rest.log()), -1)


def divergence(kind: str, student: Tensor, teacher: Tensor, js_weight: float) -> Tensor:
    """`[S]` from log-probs `[S, K + 1]` of both."""
    if kind == "reverse":
        return _kl(student, teacher)
    if kind == "forward":
        return _kl(teacher, student)
    assert kind == "js", kind
    b = torch.as_tensor(js_weight, dtype=student.dtype, device=student.device)
    mixture = torch.logaddexp(teacher + b.log(), student + (1 - b).log())
    return b * _kl(teacher, mixture) + (1 - b) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
