"""What a scalar head learns in supervised training: which of two responses is better, or a number.

Each takes the tokens that the head reads, and their targets as `returns`. One mean over pairs, or over tokens.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from relax.algorithms.objective import LossSums, ValuedTokens


class ScalarLoss(Protocol):
    """`compares_pairs`: tokens come in twos, which belong together."""

    compares_pairs: bool

    def __call__(self, tokens: ValuedTokens) -> LossSums: ...


class BradleyTerry:
    """-log sigmoid(r_chosen - r_rejected - margin). Tokens: chosen, rejected, chosen, ...; a pair's margin is its targets'
    difference. Bradley and Terry (1952); as a reward model's loss in Ouyang et al. (2022), equation 1."""

    compares_pairs = True

    def __call__(self, tokens: ValuedTokens) -> LossSums:
        gap, margin = _gaps(tokens.values), _gaps(tokens.returns)
        loss = _summed(-F.logsigmoid(gap - margin))
        loss.sums["accuracy"] = ((gap > 0).sum() + 0.5 * (gap == 0).sum(), loss.count)
        return loss


class SquaredError:
    """(value - target)^2."""

    compares_pairs = False

    def __call__(self, tokens: ValuedTokens) -> LossSums:
        return _summed((tokens.values - tokens.returns).square())


class Logistic:
    """Cross-entropy of sigmoid(value) with the target, a probability."""

    compares_pairs = False

    def __call__(self, tokens: ValuedTokens) -> LossSums:
        return _summed(F.binary_cross_entropy_with_logits(tokens.values, tokens.returns, reduction="none"))


SCALAR_LOSSES: dict[str, type[BradleyTerry] | type[SquaredError] | type[Logistic]] = {
    "bradley_terry": BradleyTerry,
    "squared": SquaredError,
    "logistic": Logistic,
}


def _gaps(column: Tensor) -> Tensor:
    """The first less the second of each pair, `[S / 2]`."""
    first, second = torch.unbind(column.view(-1, 2), 1)
    return first - second


def _summed(terms: Tensor) -> LossSums:
    total, count = terms.sum(), float(len(terms))
    return LossSums(total, count, {"loss": (total.detach(), count)})
