"""Attention over whole sequences laid end to end, as a prompt's first pass needs it."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from relax.models.causal_lm import Attend


def attend_within(lengths: Sequence[int], keep: Tensor | None = None) -> Attend:
    """Causal attention inside each of the sequences, `sum(lengths) = T`. Neighbours of one length share a call.

    `keep [L, 2, T, KV, D]` receives every layer's keys and values.
    """
    runs = [(length, len(list(same))) for length, same in groupby(lengths)]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if keep is not None:
            keep[layer, 0], keep[layer, 1] = k, v
        out, start, repeat = [], 0, q.shape[1] // k.shape[1]
        for length, count in runs:
            rows = slice(start, start + length * count)
            queries, keys, values = (t[rows].reshape(count, length, -1, t.shape[-1]).transpose(1, 2) for t in (q, k, v))
            if repeat > 1:
                keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            out.append(mixed.transpose(1, 2).flatten(0, 1))
            start = rows.stop
        return torch.cat(out) if len(out) > 1 else out[0]

    return attend
