"""The training pass of Llama- and Qwen-like dense decoders on a CPU, with its backward pass written out.

    x -> norm -> q, k, v -> (q and k norm) -> rotation -> attention -> + -> norm -> gate, up -> silu, product -> down -> + -> x

What it saves over the same model under autograd: one product for q, k, v and one for gate and up; norm weights folded into the
products that follow them, so that neither they nor their gradients cost a pass over the tokens; gradients of weights summed
inside the products that make them. The folded weights are copies, made anew when the model's own have changed; `flush` hands
the gradients to the model's parameters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relax.models.causal_lm import FusedForward
from relax.train.attention import PackedAttention
from relax.train.folded import FoldedLayer


class TrainDecoder(FusedForward):
    """`FusedForward` for the trainer, in float32 or float64."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._layers = [
            FoldedLayer(layer, self.num_heads, self.num_kv_heads, self.head_dim) for layer in self.model.model.layers
        ]
        self._is_folded = True

    def hidden_packed(self, ids: Tensor, positions: Tensor, attention: PackedAttention) -> Tensor:
        """`ids [T]`, `positions [T]` -> `[T, d]` after the final norm, with a graph where gradients are enabled."""
        self._refresh()
        body = self.model.model
        x: Tensor = F.embedding(ids, body.embed_tokens.weight)
        cos, sin = body.rotary_emb(x[None], positions[None])
        half = self.head_dim // 2
        turn = torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])
        turn = turn.expand(-1, self.num_heads + self.num_kv_heads, -1).contiguous()
        before: Any = _BeforeAttention.apply
        after: Any = _AfterAttention.apply
        for layer in self._layers:
            heads = before(x, layer, turn)
            x = after(x, attention.mix(heads, self.num_heads, self.num_kv_heads), layer)
        return F.rms_norm(x, x.shape[-1:], body.norm.weight, body.norm.variance_epsilon)

    def _refresh(self) -> None:
        if not self._is_folded:
            for layer in self._layers:
                layer.fold()
            self._is_folded = True

    def weights_changed(self) -> None:
        """Says that the model's weights were written to. The version counters of tensors do not: fused optimizers skip them."""
        self._is_folded = False

    def flush(self) -> None:
        """Adds the gradients gathered since the last call to the parameters' own."""
        for layer in self._layers:
            layer.flush()


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x` over its root mean square along the last axis, and the reciprocal of that, `[..., 1]`."""
    reciprocal = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * reciprocal, reciprocal


def _normalise_backward(of_normal: Tensor, normal: Tensor, reciprocal: Tensor, out: Tensor | None = None) -> Tensor:
    """Gradient of `x`, from that of `normal`."""
    along = torch.linalg.vecdot(of_normal, normal)[..., None].div_(normal.shape[-1])
    return torch.mul(torch.addcmul(of_normal, normal, along, value=-1), reciprocal, out=out)


class _BeforeAttention(torch.autograd.Function):
    """`x [T, d]` -> rotated queries and keys, and values, `[T, H + 2 KV, D]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FoldedLayer, turn: Tensor) -> Tensor:
        normal, reciprocal = _normalise(x, layer.eps_1)
        heads = F.linear(normal, layer.qkv, layer.qkv_bias).view(len(x), -1, layer.head_dim)
        qk = heads[:, : turn.shape[1]]
        qk_normal = qk_reciprocal = None
        if layer.qk_norm is not None:
            qk_normal, qk_reciprocal = _normalise(qk, layer.eps_qk)
            torch.mul(qk_normal, layer.qk_norm, out=qk)
        as_complex(qk).mul_(turn)
        ctx.save_for_backward(normal, reciprocal, qk_normal, qk_reciprocal, turn)
        ctx.layer = layer
        return heads

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        normal, reciprocal, qk_normal, qk_reciprocal, turn = ctx.saved_tensors
        layer: FoldedLayer = ctx.layer
        d_heads = grads[0].contiguous().clone()
        d_qk = d_heads[:, : turn.shape[1]]
        as_complex(d_qk).mul_(turn.conj())
        if layer.qk_norm is not None:
            layer.add_qk_norm((d_qk * qk_normal).sum(0))
            _normalise_backward(d_qk * layer.qk_norm, qk_normal, qk_reciprocal, out=d_qk)
        mixed = d_heads.view(len(normal), -1)
        layer.qkv_sums.add(mixed, normal)
        return _normalise_backward(mixed @ layer.qkv, normal, reciprocal), None, None


class _AfterAttention(torch.autograd.Function):
    """`x [T, d]`, attention's result `[T, H D]` -> the layer's result `[T, d]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mixed: Tensor, layer: FoldedLayer) -> Tensor:
        x = _add(x, mixed, layer.out, layer.out_bias)
        normal, reciprocal = _normalise(x, layer.eps_2)
        gate_up = F.linear(normal, layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, -1)
        active = F.silu(gate)
        product = active * up
        ctx.save_for_backward(mixed, normal, reciprocal, gate_up, active, product)
        ctx.layer = layer
        return _add(x, product, layer.down, layer.down_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        mixed, normal, reciprocal, gate_up, active, product = ctx.saved_tensors
        layer: FoldedLayer = ctx.layer
        (d_out,) = grads
        layer.down_sums.add(d_out, product)
        d_product = d_out @ layer.down
        gate, up = gate_up.chunk(2, -1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, -1)
        torch.mul(d_product, active, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_product.mul_(up), gate, grad_input=d_gate)
        layer.gate_up_sums.add(d_gate_up, normal)
        d_x = _normalise_backward(d_gate_up @ layer.gate_up, normal, reciprocal).add_(d_out)
        layer.out_sums.add(d_x, mixed)
        return d_x, d_x @ layer.out, None


def _add(x: Tensor, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` and what a projection makes of `given`."""
    return torch.addmm(x, given, weight.t()) if bias is None else x + F.linear(given, weight, bias)


def as_complex(heads: Tensor) -> Tensor:
    """Pairs of neighbours in `[T, h, D]` as complex numbers `[T, h, D / 2]`, the same memory."""
    return torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2))
