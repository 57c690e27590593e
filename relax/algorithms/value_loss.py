"""The critic's loss, clipped around the values that its advantages were computed with.

loss = max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2) / 2
"""

import torch

from relax.algorithms.objective import LossSums, ValuedTokens, aggregate
from relax.config.algorithm import CustomConfig, PPOConfig


class ValueLoss:
    """Built as `ValueLoss(config, length_budget)`; called with `ValuedTokens`, where a policy objective gets trained ones."""

    compares_pairs = False

    def __init__(self, config: PPOConfig | CustomConfig, length_budget: int) -> None:
        self._clip, self._how, self._length_budget = config.value_clip, config.aggregation, length_budget

    def __call__(self, tokens: ValuedTokens) -> LossSums:
        values, old, returns = tokens.values, tokens.old_values, tokens.returns
        loss = (values - returns).square()
        is_clipped = torch.zeros_like(returns, dtype=torch.bool)
        if self._clip is not None:
            assert old is not None, "a clip needs the column 'values'"
            clipped = (torch.clamp(values, old - self._clip, old + self._clip) - returns).square()
            is_clipped = (clipped > loss).detach()
            loss = torch.maximum(loss, clipped)
        total, count = aggregate(loss / 2, tokens, self._how, self._length_budget)
        errors, number = (values - returns).detach(), float(values.numel())
        out = LossSums(total, count, {"value_loss": (total.detach(), count)})
        out.sums["value/clip_fraction"] = (is_clipped.sum(), number)
        for name, column in (("value", values.detach()), ("value/error", errors), ("return", returns)):
            out.sums[f"{name}/mean"] = (column.sum(), number)
            out.sums[f"{name}/mean_square"] = (column.square().sum(), number)
        return out
