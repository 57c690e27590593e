"""One decoder layer's weights as the training pass wants them, and the sums of their gradients.

Folded into the products: norm weights, the scale of the attention, and an order of each head's entries in which the two that
the rotation mixes are neighbours (scores do not depend on the order).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class GradientSums:
    """Sums of the gradients of a weight `[out, in]` and its bias `[out]`."""

    def __init__(self, weight: Tensor, has_bias: bool) -> None:
        self.weight = torch.zeros_like(weight)
        self.bias = weight.new_zeros(len(weight)) if has_bias else None

    def add(self, of_output: Tensor, given: Tensor) -> None:
        """`of_output [T, out]`, `given [T, in]`."""
        self.weight.addmm_(of_output.t(), given)
        if self.bias is not None:
            self.bias.add_(of_output.sum(0))

    def zero_(self) -> None:
        self.weight.zero_()
        if self.bias is not None:
            self.bias.zero_()


class FoldedLayer:
    """`qkv`, `gate_up` are folded copies, `out` and `down` the model's own tensors."""

    def __init__(self, layer: Any, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        at, mlp = layer.self_attn, layer.mlp
        self._layer, self.head_dim, self._num_heads, self._num_kv = layer, head_dim, num_heads, num_kv_heads
        self.eps_1, self.eps_2 = layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon
        self._qkv, self._gate_up = (at.q_proj, at.k_proj, at.v_proj), (mlp.gate_proj, mlp.up_proj)
        self._norms: tuple[Any, ...] = (at.q_norm, at.k_norm) if hasattr(at, "q_norm") else ()
        self.eps_qk = self._norms[0].variance_epsilon if self._norms else 0.0
        self._order = torch.arange(head_dim).view(2, -1).t().reshape(-1)
        self.fold()
        self.qkv_sums = GradientSums(self.qkv, self.qkv_bias is not None)
        self.gate_up_sums = GradientSums(self.gate_up, self.gate_up_bias is not None)
        self.out_sums = GradientSums(self.out, self.out_bias is not None)
        self.down_sums = GradientSums(self.down, self.down_bias is not None)
        heads = num_heads + num_kv_heads
        self._qk_norm_sum: Tensor | None = self.qkv.new_zeros(heads, head_dim) if self._norms else None

    @torch.no_grad()
    def fold(self) -> None:
        """Makes the copies from the model's weights as they are now."""
        layer = self._layer
        self.qkv = self._arrange([p.weight for p in self._qkv]) * layer.input_layernorm.weight
        self.qkv_bias: Tensor | None = None
        if self._qkv[0].bias is not None:
            self.qkv_bias = self._arrange([p.bias for p in self._qkv])
        self.gate_up = torch.cat([p.weight for p in self._gate_up]) * layer.post_attention_layernorm.weight
        self.gate_up_bias: Tensor | None = None
        if self._gate_up[0].bias is not None:
            self.gate_up_bias = torch.cat([p.bias for p in self._gate_up])
        self.out, self.out_bias = layer.self_attn.o_proj.weight.detach(), _detached(layer.self_attn.o_proj.bias)
        self.down, self.down_bias = layer.mlp.down_proj.weight.detach(), _detached(layer.mlp.down_proj.bias)
        self.qk_norm: Tensor | None = None
        if self._norms:
            q, k = (norm.weight[self._order] for norm in self._norms)
            self.qk_norm = torch.cat((q.mul(self._scale).expand(self._num_heads, -1), k.expand(self._num_kv, -1)))

    @property
    def _scale(self) -> float:
        return float(self.head_dim**-0.5)

    def _arrange(self, parts: Sequence[Tensor]) -> Tensor:
        """q, k, v below one another, each head of q and k in the rotation's order, q scaled unless its norm does that."""
        q, k, v = parts
        q, k = self._by_head(q)[:, self._order], self._by_head(k)[:, self._order]
        return torch.cat((q.flatten(0, 1) * (1.0 if self._norms else self._scale), k.flatten(0, 1), v))

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.head_dim, *rows.shape[1:])

    def _restore(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The way back of `_arrange`, for gradients."""
        widths = [self._num_heads * self.head_dim, self._num_kv * self.head_dim, self._num_kv * self.head_dim]
        q, k, v = torch.split(rows, widths)
        back = torch.argsort(self._order)
        q, k = self._by_head(q)[:, back].flatten(0, 1), self._by_head(k)[:, back].flatten(0, 1)
        return q * (1.0 if self._norms else self._scale), k, v

    def add_qk_norm(self, gradient: Tensor) -> None:
        """Adds `[H + KV, D]`, the gradient of the q and k norms' weights, head by head."""
        assert self._qk_norm_sum is not None
        self._qk_norm_sum.add_(gradient)

    @torch.no_grad()
    def flush(self) -> None:
        """Adds the sums to the gradients of the model's parameters, and begins anew."""
        layer = self._layer
        _unfold(self.qkv_sums.weight, self._arrange([p.weight for p in self._qkv]), layer.input_layernorm.weight)
        for projection, part in zip(self._qkv, self._restore(self.qkv_sums.weight), strict=True):
            add_gradient(projection.weight, part)
        _unfold(self.gate_up_sums.weight, torch.cat([p.weight for p in self._gate_up]), layer.post_attention_layernorm.weight)
        for projection, part in zip(self._gate_up, self.gate_up_sums.weight.chunk(2), strict=True):
            add_gradient(projection.weight, part)
        if self.qkv_sums.bias is not None:
            for projection, part in zip(self._qkv, self._restore(self.qkv_sums.bias), strict=True):
                add_gradient(projection.bias, part)
        if self.gate_up_sums.bias is not None:
            for projection, part in zip(self._gate_up, self.gate_up_sums.bias.chunk(2), strict=True):
                add_gradient(projection.bias, part)
        for projection, sums in ((layer.self_attn.o_proj, self.out_sums), (layer.mlp.down_proj, self.down_sums)):
            add_gradient(projection.weight, sums.weight)
            if sums.bias is not None:
                add_gradient(projection.bias, sums.bias)
        for sums in (self.qkv_sums, self.gate_up_sums, self.out_sums, self.down_sums):
            sums.zero_()
        if self._qk_norm_sum is not None:
            q, k = torch.split(self._qk_norm_sum, [self._num_heads, self._num_kv])
            back = torch.argsort(self._order)
            add_gradient(self._norms[0].weight, q.sum(0)[back] * self._scale)
            add_gradient(self._norms[1].weight, k.sum(0)[back])
            self._qk_norm_sum.zero_()


def _unfold(of_folded: Tensor, plain: Tensor, norm: nn.Parameter) -> None:
    """From the gradient of `plain * norm` to those of `norm` (added) and of `plain` (in place)."""
    add_gradient(norm, (of_folded * plain).sum(0))
    of_folded.mul_(norm)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Adds a copy of `gradient`, unless the parameter is frozen."""
    if not parameter.requires_grad:
        return
    before: Tensor | None = parameter.grad
    parameter.grad = gradient.clone() if before is None else before.add_(gradient)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
