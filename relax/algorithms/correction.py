"""Weights for the gap between the probabilities that sampled and those that train: `w = exp(o - b)`, detached."""

import torch
from torch import Tensor

from relax.config.algorithm import CorrectionConfig


def correction_weight(config: CorrectionConfig, old: Tensor, rollout: Tensor | None) -> Tensor | None:
    """`[S]` weights, none when there is nothing to correct. `tis`: truncated importance sampling, `min(w, cap)`."""
    if config.type == "none" or rollout is None:
        return None
    return torch.exp(old - rollout).clamp(max=config.cap)
