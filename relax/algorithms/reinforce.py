"""The plain policy gradient (Williams 1992): loss = -A l, with the weight of the correction where there is one."""

from torch import Tensor

from relax.algorithms.objective import TrainedTokens
from relax.algorithms.policy import PolicyObjective, Surrogate


class Reinforce(PolicyObjective):
    """Per token."""

    def surrogate(self, tokens: TrainedTokens, old: Tensor, advantages: Tensor) -> Surrogate:
        return Surrogate(-advantages * tokens.logprobs)
