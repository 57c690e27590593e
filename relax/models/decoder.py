"""A dense Llama-, Qwen2- or Qwen3-like decoder for inference, on its own copies of the weights.

    x --norm--> [q k v] --norm, rotate q and k--> attend --> out + x --norm--> [gate up] --> silu(gate) * up --> down + x

Copies, because one product then does the work of three (query, key, value) or two (gate, up), and because a policy version
that is being proven lies beside the one that generates. It is a `FlatForward`, and agrees with the others to rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relax.models.causal_lm import Attend

_SCALED_BY_LENGTH = ("dynamic", "longrope")  # rotary angles that depend on how long the sequence is by now


class RotaryTable:
    """Cosines and signed sines of every position, computed once by the model's own rotary module.

    `rotary` is that module, on the CPU with real frequencies. A table serves every version of the weights.
    """

    def __init__(self, rotary: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary, self._dtype, self._device = rotary, dtype, device
        self._cos = self._sin = torch.empty(0)
        self.reserve(256)

    @staticmethod
    def fits(config: Any) -> bool:
        """Whether the angles depend on the position alone."""
        parameters = getattr(config, "rope_parameters", None) or {}
        return parameters.get("rope_type", "default") not in _SCALED_BY_LENGTH

    def reserve(self, length: int) -> None:
        """Makes the table reach positions below `length`. Whoever asks for positions calls it first: looking at them here
        would make the host wait for the device at every step."""
        if length <= len(self._cos):
            return
        length = 1 << (length - 1).bit_length()
        cos, sin = self._rotary(torch.empty(1, dtype=torch.float32), torch.arange(length)[None])
        sign = torch.ones(sin.shape[-1])
        sign[: sin.shape[-1] // 2] = -1
        self._cos = cos[0, :, None].to(self._device, self._dtype)
        self._sin = (sin[0] * sign)[:, None].to(self._device, self._dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions [T]` within what was reserved -> two tables `[T, 1, D]`."""
        return self._cos[positions], self._sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [T, H, D]`: each half of a head times the cosines, plus the other half times the signed sines."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's weights, fused."""

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [H + KV, D]
    out: Tensor
    out_bias: Tensor | None
    norm2: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Decoder:
    """A `FlatForward` on fused copies of weights, which `copy` fills in, one part after the other.

    `weights` stand for what will be copied: tensors of any device by their Hugging Face names, of which types and shapes count.
    """

    media_ids: tuple[int, ...] = ()

    def __init__(self, config: Any, rotary: RotaryTable, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._eps, self._rotary = float(config.rms_norm_eps), rotary
        self._weights, self._device = weights, device
        self._slots: dict[str, Tensor] = {}
        self._embed = self._own("model.embed_tokens.weight")
        self._norm = self._own("model.norm.weight")
        self._layers = [self._layer(f"model.layers.{index}.") for index in range(self.num_layers)]
        tied = "lm_head.weight" not in weights
        self._head = self._embed if tied else self._own("lm_head.weight")
        self._head_bias = self._maybe("lm_head.bias")
        self._weights = {}

    def copy(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the values of these tensors; once all have been taken, the decoder computes with them."""
        for name, tensor in weights.items():
            self._slots[name].copy_(tensor)

    def _own(self, *names: str) -> Tensor:
        """Room for these tensors, one below the other."""
        parts = [self._weights[name] for name in names]
        room = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=parts[0].dtype, device=self._device)
        self._slots |= zip(names, room.split_with_sizes([len(part) for part in parts]), strict=True)
        return room

    def _maybe(self, *names: str) -> Tensor | None:
        return self._own(*names) if names[0] in self._weights else None

    def _layer(self, at: str) -> _Layer:
        qkv = [f"{at}self_attn.{kind}_proj" for kind in "qkv"]
        gate_up = [f"{at}mlp.{kind}_proj" for kind in ("gate", "up")]
        q_norm, k_norm = f"{at}self_attn.q_norm.weight", f"{at}self_attn.k_norm.weight"
        qk_norm = None
        if q_norm in self._weights and k_norm in self._weights:
            heads = (self.num_heads, self.num_kv_heads)
            qk_norm = torch.empty(sum(heads), self.head_dim, dtype=self._weights[q_norm].dtype, device=self._device)
            self._slots |= zip(
                (q_norm, k_norm), qk_norm.split_with_sizes(heads), strict=True
            )  # one norm for all heads of a kind
        return _Layer(
            norm1=self._own(f"{at}input_layernorm.weight"),
            qkv=self._own(*(f"{name}.weight" for name in qkv)),
            qkv_bias=self._maybe(*(f"{name}.bias" for name in qkv)),
            qk_norm=qk_norm,
            out=self._own(f"{at}self_attn.o_proj.weight"),
            out_bias=self._maybe(f"{at}self_attn.o_proj.bias"),
            norm2=self._own(f"{at}post_attention_layernorm.weight"),
            gate_up=self._own(*(f"{name}.weight" for name in gate_up)),
            gate_up_bias=self._maybe(*(f"{name}.bias" for name in gate_up)),
            down=self._own(f"{at}mlp.down_proj.weight"),
            down_bias=self._maybe(f"{at}mlp.down_proj.bias"),
        )

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Weight `[V, d]` and bias `[V]` of the vocabulary projection."""
        return self._head, self._head_bias

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`ids [T]`, `positions [T]` int64 -> `[T, d]`, after the final norm."""
        x = F.embedding(ids, self._embed)
        cos, sin = self._rotary.at(positions)
        width, q_width = x.shape[-1:], self.num_heads
        heads = q_width + self.num_kv_heads
        for index, layer in enumerate(self._layers):
            mixed = F.linear(F.rms_norm(x, width, layer.norm1, self._eps), layer.qkv, layer.qkv_bias)
            mixed = mixed.view(len(mixed), -1, self.head_dim)
            qk, v = mixed[:, :heads], mixed[:, heads:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (self.head_dim,), None, self._eps) * layer.qk_norm
            qk = rotate(qk, cos, sin)
            x = _add(x, attend(index, qk[:, :q_width], qk[:, q_width:], v).flatten(-2), layer.out, layer.out_bias)
            h = F.linear(F.rms_norm(x, width, layer.norm2, self._eps), layer.gate_up, layer.gate_up_bias)
            gate, up = h.chunk(2, -1)
            x = _add(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        return F.rms_norm(x, width, self._norm, self._eps)


def _add(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The residual `x` plus a projection of `h`."""
    return torch.addmm(x, h, weight.t()) if bias is None else x + F.linear(h, weight, bias)
