"""Attention of short packed rows on a CPU, with its backward pass written out.

Every query of a group meets the group's shared prompt in one product, and its own row's tokens in another; scores are held, so
that this is for short rows only. Heads of a query group are rows of one product, keys and values are never repeated.

    heads [T, H + 2 KV, D]: queries (already scaled), keys, values  ->  [T, H D]

Blocks are laid out as [G groups, KV, n samples, rep, L, D]. Gathering and its way back are index copies: every token has one
place, padded places get no gradient, and only the prompt's keys and values collect from both their own rows and the samples'.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Places:
    """One block's rows of `heads.view(-1, D)`: flat indices, and the block's sizes."""

    groups: int
    samples: int
    length: int
    context: int
    q: Tensor
    k: Tensor
    v: Tensor
    context_k: Tensor
    context_v: Tensor


class DensePlan:
    """Where everything lies, for one micro-batch. `blocks`: (own `[G, n, L]`, lengths `[G, n]`, context `[G, C]`) of tokens."""

    def __init__(self, blocks: list[tuple[Ints, Ints, Ints]], num_tokens: int, num_heads: int, num_kv_heads: int) -> None:
        self.num_heads, self.num_kv_heads, self.num_tokens = num_heads, num_kv_heads, num_tokens
        width, repeats = num_heads + 2 * num_kv_heads, num_heads // num_kv_heads
        kv = np.arange(num_kv_heads)
        out_slots, q_slots = np.zeros((num_tokens, num_heads), np.int64), np.zeros((num_tokens, width), np.int64)
        sizes = [(own.size * num_heads, own.size * num_kv_heads) for own, _, _ in blocks]
        base_q, base_k = 0, sum(q for q, _ in sizes)
        base_v = base_k + sum(k for _, k in sizes)
        self.blocks: list[_Places] = []
        for own, lengths, context in blocks:
            groups, samples, length = own.shape
            at = own[:, None, :, None, :] * width
            q = at + (kv[:, None] * repeats + np.arange(repeats))[None, :, None, :, None]
            k = own[:, None] * width + num_heads + kv[None, :, None, None]
            ck = context[:, None] * width + num_heads + kv[None, :, None]
            self.blocks.append(
                _Places(groups, samples, length, context.shape[1], *map(_flat, (q, k, k + num_kv_heads, ck, ck + num_kv_heads)))
            )
            real = np.arange(length) < lengths[:, :, None]
            where_q = base_q + np.arange(q.size).reshape(q.shape).transpose(0, 2, 4, 1, 3)[real].reshape(-1, num_heads)
            where_k = np.arange(k.size).reshape(k.shape).transpose(0, 2, 3, 1)[real]
            tokens = own[real]
            out_slots[tokens] = where_q
            q_slots[tokens, :num_heads] = where_q
            q_slots[tokens, num_heads : num_heads + num_kv_heads] = base_k + where_k
            q_slots[tokens, num_heads + num_kv_heads :] = base_v + where_k
            base_q, base_k, base_v = base_q + q.size, base_k + k.size, base_v + k.size
        self.out_slots, self.head_slots = _flat(out_slots), _flat(q_slots)
        self.num_out = sum(q for q, _ in sizes)
        self.biases = {block.length: _causal(block.length) for block in self.blocks}


def _flat(index: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index).reshape(-1))


def _causal(length: int) -> Tensor:
    return torch.full((length, length), -torch.inf).triu_(1)


def dense_attention(heads: Tensor, plan: DensePlan) -> Tensor:
    """`heads [T, H + 2 KV, D]` -> `[T, H D]`."""
    apply: Any = _DenseAttention.apply
    out: Tensor = apply(heads, plan)
    return out


class _DenseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, plan: DensePlan) -> Tensor:
        rows = heads.reshape(-1, heads.shape[-1])
        outs, saved = [], []
        for block in plan.blocks:
            out, tensors = _forward_block(rows, block, plan)
            outs.append(out)
            saved += tensors
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.shape = plan, heads.shape
        together = torch.cat(outs) if len(outs) > 1 else outs[0]
        return together.index_select(0, plan.out_slots).view(len(heads), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        plan, depth = ctx.plan, ctx.shape[-1]
        flat = grads[0].reshape(-1, depth)
        of_out = flat.new_zeros(plan.num_out, depth).index_copy_(0, plan.out_slots, flat)
        parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        contexts, first = [], 0
        for number, block in enumerate(plan.blocks):
            size = len(block.q)
            q, k, v, context_k, context_v, weights = ctx.saved_tensors[6 * number : 6 * number + 6]
            found = _backward_block(of_out[first : first + size], q, k, v, context_k, context_v, weights, block)
            first += size
            for part, into in zip(found[:3], parts, strict=True):
                into.append(part.view(-1, depth))
            if block.context:
                contexts.append((block, found[3], found[4]))
        d_heads = torch.cat(parts[0] + parts[1] + parts[2]).index_select(0, plan.head_slots)
        for block, of_k, of_v in contexts:
            d_heads.index_add_(0, block.context_k, of_k.view(-1, depth))
            d_heads.index_add_(0, block.context_v, of_v.view(-1, depth))
        return d_heads.view(ctx.shape), None


def _forward_block(rows: Tensor, block: _Places, plan: DensePlan) -> tuple[Tensor, list[Tensor]]:
    """Outputs `[G KV n rep L, D]` in the block's order, and what the backward pass needs."""
    depth, kv = rows.shape[-1], plan.num_kv_heads
    outer, inner = block.groups * kv, plan.num_heads // kv * block.length
    many = outer * block.samples
    q = rows.index_select(0, block.q)
    k, v = (rows.index_select(0, at).view(many, block.length, depth) for at in (block.k, block.v))
    context_k, context_v = (
        rows.index_select(0, at).view(outer, block.context, depth) for at in (block.context_k, block.context_v)
    )
    scores = torch.bmm(q.view(many, inner, depth), k.transpose(1, 2))
    scores.view(-1, block.length, block.length).add_(plan.biases[block.length])
    if block.context:
        shared = torch.bmm(q.view(outer, -1, depth), context_k.transpose(1, 2))
        scores = torch.cat((shared.view(many, inner, block.context), scores), -1)
    weights = torch.softmax(scores, -1)
    out = torch.bmm(weights[..., block.context :], v)
    if block.context:
        out.view(outer, -1, depth).baddbmm_(weights.view(outer, -1, weights.shape[-1])[..., : block.context], context_v)
    return out.view(-1, depth), [q, k, v, context_k, context_v, weights]


def _backward_block(
    of_out: Tensor, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, weights: Tensor, block: _Places
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the shared prompt's k and v."""
    many, inner, seen = weights.shape
    outer, depth, context = len(context_k), q.shape[-1], block.context
    own, q_own = of_out.view(many, inner, depth), q.view(many, inner, depth)
    d_v = torch.bmm(weights[..., context:].transpose(1, 2), own)
    d_weights = torch.bmm(own, v.transpose(1, 2))
    d_context_k = d_context_v = context_k
    if context:
        of_group, shared = of_out.view(outer, -1, depth), weights.view(outer, -1, seen)[..., :context]
        d_context_v = torch.bmm(shared.transpose(1, 2), of_group)
        d_shared = torch.bmm(of_group, context_v.transpose(1, 2)).view(many, inner, context)
        d_weights = torch.cat((d_shared, d_weights), -1)
    d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    d_q = torch.bmm(d_scores[..., context:], k)
    d_k = torch.bmm(d_scores[..., context:].transpose(1, 2), q_own)
    if context:
        shared = d_scores.view(outer, -1, seen)[..., :context]
        d_q.view(outer, -1, depth).baddbmm_(shared, context_k)
        d_context_k = torch.bmm(shared.transpose(1, 2), q.view(outer, -1, depth))
    return d_q, d_k, d_v, d_context_k, d_context_v
