"""Estimators of the KL divergence from the current policy to the reference, per sampled token.

Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from torch import Tensor


def kl_estimate(kind: str, logprobs: Tensor, ref: Tensor) -> Tensor:
    """`[S]`: k1 = l - f, k2 = (l - f)^2 / 2, k3 = exp(f - l) - (f - l) - 1; the gradient flows through `logprobs`."""
    log_ratio = logprobs - ref
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    assert kind == "k3", kind
    return (-log_ratio).expm1() + log_ratio
