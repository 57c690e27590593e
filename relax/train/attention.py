"""Attention over packed groups: a sample's own tokens see their group's shared prompt and, causally, one another.

    prompts:  own tokens only                     rows of one kind and of about equal length are laid out as
    samples:  prompt of their group, own tokens   dense [rows, length] blocks: no mask grows with the whole pack

A block's samples have prompts of one length, so that one small causal mask serves all its rows: padding lies after a row's own
tokens, where causality hides it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from relax.data.packing import MicroBatch

_FULL_ENOUGH = 0.7  # a row joins a block if it fills this share of the block's length; short rows may always join
_SHORT = 32

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """`own [R, L]` and `context [R, C]`: places of tokens in the flat batch; padding repeats a row's last place."""

    own: Tensor
    context: Tensor


class PackedAttention:
    """The attention of one micro-batch, called by the model's forward once a layer."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        blocks, slots, base = [], np.zeros(len(batch.ids), np.int64), 0
        for own, lengths, context in _blocks(batch):
            real = np.arange(own.shape[1])[None, :] < lengths[:, None]
            slots[own[real]] = base + np.flatnonzero(real)
            base += own.size
            blocks.append(Block(torch.from_numpy(own).to(device), torch.from_numpy(context).to(device)))
        self._blocks, self._slots = blocks, torch.from_numpy(slots).to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [T, H, D]`, `k`, `v [T, KV, D]` -> `[T, H, D]`."""
        outs = []
        for block in self._blocks:
            seen = torch.cat((block.context, block.own), 1)
            out = _attend(q[block.own], k[seen], v[seen], block.context.shape[1])
            outs.append(out.flatten(0, 1))
        return torch.cat(outs)[self._slots]


def _attend(q: Tensor, k: Tensor, v: Tensor, context: int) -> Tensor:
    """`q [R, L, H, D]`, `k`, `v [R, C + L, KV, D]` -> `[R, L, H, D]`."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    mask = None
    if context:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_(context)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


def _blocks(batch: MicroBatch) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(own `[R, L]`, lengths `[R]`, context `[R, C]`) of every block."""
    yield from _rows(batch.prefix_starts, batch.prefix_lengths, np.zeros_like(batch.prefix_starts), 0)
    contexts = batch.prefix_lengths[batch.groups]
    for context in np.unique(contexts):
        rows = contexts == context
        yield from _rows(batch.starts[rows], batch.lengths[rows], batch.prefix_starts[batch.groups[rows]], int(context))


def _rows(starts: Ints, lengths: Ints, contexts: Ints, context: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Longest rows first; a new block begins where too much of it would be padding. Empty rows attend to nothing."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    while len(order):
        longest = int(lengths[order[0]])
        fits = (
            int((lengths[order] >= min(longest, max(_SHORT, longest * _FULL_ENOUGH))).sum()) if longest > _SHORT else len(order)
        )
        rows, order = order[:fits], order[fits:]
        places = np.minimum(np.arange(longest)[None, :], lengths[rows, None] - 1)
        yield starts[rows, None] + places, lengths[rows], contexts[rows, None] + np.arange(context)[None, :]
