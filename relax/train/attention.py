"""Attention over packed groups: a sample's own tokens see their group's shared prompt and, causally, one another.

    prompts:  own tokens only                     rows of one kind and of about equal length are laid out as
    samples:  prompt of their group, own tokens   dense [rows, length] blocks: no mask grows with the whole pack

The samples of a block have prompts of one length, so that one small causal mask serves all its rows: padding lies after a
row's own tokens, where causality hides it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from relax.data.packing import MicroBatch
from relax.train.dense_attention import DensePlan, dense_attention

_FULL_ENOUGH = 0.7  # a row joins a block if it fills this share of the block's length; short rows may always join
_SHORT = 32
_DENSE_LIMIT = 1 << 15  # scores of one row and head above which they are not held

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """`own [R, L]` and `context [R, C]`: places of tokens in the flat batch; padding repeats a row's last place."""

    own: Tensor
    context: Tensor


class PackedAttention:
    """The attention of one micro-batch. A forward pass calls it once a layer."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self._dense: DensePlan | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [T, H, D]`, `k`, `v [T, KV, D]` -> `[T, H, D]`."""
        return self._attend(q, k, v, q.shape[-1] ** -0.5)

    def mix(self, heads: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
        """`heads [T, H + 2 KV, D]`, of queries that are scaled already, keys and values -> `[T, H D]`."""
        if self._is_small and heads.device.type == "cpu":
            if self._dense is None:
                blocks = list(_dense_blocks(self._batch))
                self._dense = DensePlan(blocks, len(self._batch.ids), num_heads, num_kv_heads)
            return dense_attention(heads, self._dense)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
        return self._attend(q, k, v, 1.0).flatten(1)

    @cached_property
    def _is_small(self) -> bool:
        batch = self._batch
        longest, context = max(int(batch.lengths.max()), 1), int(batch.prefix_lengths.max())
        return longest * (longest + context) <= _DENSE_LIMIT and context**2 <= _DENSE_LIMIT

    @cached_property
    def _layout(self) -> tuple[list[Block], Tensor]:
        """The blocks, and each token's place in their outputs laid end to end."""
        blocks, slots, base = [], np.zeros(len(self._batch.ids), np.int64), 0
        for own, lengths, context in _blocks(self._batch):
            real = np.arange(own.shape[1])[None, :] < lengths[:, None]
            slots[own[real]] = base + np.flatnonzero(real)
            base += own.size
            blocks.append(Block(torch.from_numpy(own).to(self._device), torch.from_numpy(context).to(self._device)))
        return blocks, torch.from_numpy(slots).to(self._device)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        blocks, slots = self._layout
        outs = []
        for block in blocks:
            seen = torch.cat((block.context, block.own), 1)
            out = _attend_block(q[block.own], k[seen], v[seen], block.context.shape[1], scale)
            outs.append(out.flatten(0, 1))
        return torch.cat(outs)[slots]


def _attend_block(q: Tensor, k: Tensor, v: Tensor, context: int, scale: float) -> Tensor:
    """`q [R, L, H, D]`, `k`, `v [R, C + L, KV, D]` -> `[R, L, H, D]`."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    mask = None
    if context:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_(context)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale).transpose(1, 2)


def _blocks(batch: MicroBatch) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(own `[R, L]`, lengths `[R]`, context `[R, C]`) of every block; prompts, then samples."""
    for rows in _alike(batch.prefix_lengths):
        own, lengths = _places(batch.prefix_starts[rows], batch.prefix_lengths[rows])
        yield own, lengths, np.zeros((len(rows), 0), np.int64)
    contexts = batch.prefix_lengths[batch.groups]
    for context in np.unique(contexts).tolist():
        for rows in _alike(np.where(contexts == context, batch.lengths, 0)):
            own, lengths = _places(batch.starts[rows], batch.lengths[rows])
            yield own, lengths, batch.prefix_starts[batch.groups[rows]][:, None] + np.arange(context)


def _dense_blocks(batch: MicroBatch) -> Iterator[tuple[Ints, Ints, Ints]]:
    """(own `[G, n, L]`, lengths `[G, n]`, context `[G, C]`) of every block: groups of one size side by side."""
    for rows in _alike(batch.prefix_lengths):
        own, lengths = _places(batch.prefix_starts[rows], batch.prefix_lengths[rows])
        yield own[:, None], lengths[:, None], np.zeros((len(rows), 0), np.int64)
    sizes = np.bincount(batch.groups, minlength=len(batch.prefix_starts))
    firsts = np.cumsum(sizes) - sizes
    longest = np.maximum.reduceat(batch.lengths, firsts)
    kinds = np.stack((batch.prefix_lengths, sizes), 1)
    for kind in np.unique(kinds, axis=0):
        for groups in _alike(np.where((kinds == kind).all(1), longest, 0)):
            rows = (firsts[groups][:, None] + np.arange(kind[1])).reshape(-1)
            own, lengths = _places(batch.starts[rows], batch.lengths[rows])
            shape = (len(groups), int(kind[1]))
            yield own.reshape(*shape, -1), lengths.reshape(shape), batch.prefix_starts[groups][:, None] + np.arange(kind[0])


def _places(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """`[R, L]` of rows padded with their last place (an empty row with whatever stands before it), and their lengths."""
    inside = np.minimum(np.arange(int(lengths.max())), lengths[:, None] - 1)
    return np.maximum(starts[:, None] + inside, 0), lengths


def _alike(lengths: Ints) -> Iterator[Ints]:
    """Indices of rows of about equal length, longest first. Empty rows attend to nothing."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    while len(order):
        longest = int(lengths[order[0]])
        fits = len(order) if longest <= _SHORT else int((lengths[order] >= max(_SHORT, longest * _FULL_ENOUGH)).sum())
        yield order[: max(fits, 1)]
        order = order[max(fits, 1) :]
