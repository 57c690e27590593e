"""The plain policy gradient that takes every sample for a fresh one: what `stability.py` shows to fail. Not for use."""

from torch import Tensor

from relax.algorithms.estimate import FloatVector, Trajectories
from relax.algorithms.objective import TrainedTokens
from relax.algorithms.policy import PolicyObjective, Surrogate


class Uncorrected(PolicyObjective):
    """-A l, whoever sampled the token."""

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        return Surrogate(-advantages * tokens.logprobs)


def baseline(given: Trajectories) -> FloatVector:
    """The advantages of `reinforce`: rewards less their group's mean."""
    return given.spread(given.rewards - given.rewards.mean())
