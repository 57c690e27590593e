"""Sampling by inverse CDF: one uniform number a row, which only the row's seed and the token's index decide."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 64  # probabilities are summed in blocks first: a running sum over the vocabulary is ten times slower


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from counters, `[n]`: entry `i` is a hash of `(seeds[i], indices[i])` and of nothing else.

    Two rounds of SplitMix64's finalizer (Steele, Lea and Flood 2014), the index added between them.
    """
    x = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
    x = _mix(x + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of n rows is sampled; none stands for the common case in which no row needs it.

    `temperature [n]` float32 with 1 in greedy rows, `is_greedy [n]` bool, and for the rows `filtered [m]` int64 their
    `top_p [m]` float32 (1 is off) and `top_k [m]` int64 (0 is off).
    """

    temperature: Tensor | None = None
    is_greedy: Tensor | None = None
    filtered: Tensor | None = None
    top_p: Tensor | None = None
    top_k: Tensor | None = None


def sample(logits: Tensor, rows: SamplingRows, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`logits [n, V]`, `uniform [n]` float64 -> tokens `[n]` int64 and their log-probs `[n]` float32.

    A log-prob is that of the distribution sampled from: at the temperature, over what top-k and top-p left. A greedy row's is
    at temperature 1. It is NaN where the logits are not finite.
    """
    logits = logits.float()
    if rows.temperature is not None:
        logits = logits / rows.temperature[:, None]
    if rows.filtered is not None and rows.top_p is not None and rows.top_k is not None:
        logits = logits.index_copy(0, rows.filtered, likeliest(logits[rows.filtered], rows.top_p, rows.top_k))
    probabilities = torch.softmax(logits, -1)
    tokens = inverse_cdf(probabilities, uniform)
    if rows.is_greedy is not None:
        tokens = torch.where(rows.is_greedy, probabilities.argmax(-1), tokens)
    return tokens, probabilities.gather(-1, tokens[:, None])[:, 0].log()


def likeliest(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """`logits [m, V]` with -inf outside of the `top_k` likeliest tokens, and outside of the fewest whose share of what
    `top_k` left reaches `top_p`. The likeliest token always stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0)[:, None] & (ranks >= top_k[:, None]), -torch.inf)
    shares = torch.softmax(ordered, -1)
    before = shares.cumsum(-1) - shares
    ordered = ordered.masked_fill((top_p < 1)[:, None] & (before >= top_p[:, None]) & (ranks > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """`probabilities [n, V]` float32, `uniform [n]` float64 in [0, 1) -> `[n]` int64, never a token of probability 0.

    The running sum is float64, first over blocks of the vocabulary and then inside the one that is hit.
    """
    size = probabilities.shape[-1]
    if size % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, _BLOCK - size % _BLOCK))
    blocks = probabilities.view(len(probabilities), -1, _BLOCK)
    running = blocks.sum(-1).double().cumsum(-1)
    block, rest = _first_above(running, uniform[:, None] * running[:, -1:])
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    token, _ = _first_above(inside.double().cumsum(-1), rest)
    # Only where a probability is NaN can the search run over the end.
    return (block * _BLOCK + token)[:, 0].clamp_(max=size - 1)


def _first_above(running: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry `[n, 1]` whose running sum `[n, k]` exceeds `target [n, 1]`, and what the sum before it leaves over."""
    total = running[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # rounding may reach the end
    found = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[-1] - 1)
    before = torch.where(found > 0, running.gather(-1, (found - 1).clamp_(min=0)), 0.0)
    return found, target - before
