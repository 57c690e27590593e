"""One forward pass for trainer and embedded engine: flat tokens in, hidden states out, attention handed in by the caller.

    ids [T], positions [T] --> embed --> layers: q, k, v --> attend(layer, q, k, v) --> ... --> final norm --> hidden [T, d]

A batch is any set of sequences laid end to end: `positions` restart where a sequence starts, and only `attend` knows which
tokens see which. The trainer hands in packed attention, the engine attention over its key-value slots. Two implementations are
here: `FusedForward` for Llama- and Qwen-like dense decoders, and `TransformersForward`, which runs any transformers model whose
layers use the attention interface. `models/forward.py` chooses.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relax.errors import ModelError

# (layer index, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

_FUSED_TYPES = ("llama", "qwen2", "qwen3")
_INTERFACE = "relax_flat"


class FlatForward(Protocol):
    """Hidden states of flat tokens, and the sizes that an attention needs. `media_ids` are tokens that nobody may write."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    media_ids: tuple[int, ...]

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`ids [T]`, `positions [T]` int64 -> `[T, d]`, after the final norm."""
        ...

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Weight `[V, d]` and bias `[V]` of the vocabulary projection."""
        ...


def check_attention(config: Any) -> None:
    """Raises `ModelError` unless every layer of the text model `config` is one of full attention."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ModelError(
            f"model type {config.model_type!r} has layers of kind {sorted(layer_types - {'full_attention'})}: "
            "relax computes full causal attention only"
        )
    window, context = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    if not getattr(config, "layer_types", None) and window and (context is None or window < context):
        raise ModelError(
            f"model type {config.model_type!r} looks back {window} tokens (sliding_window in config.json): "
            "relax computes full causal attention only"
        )


def is_fusable(config: Any) -> bool:
    """Whether the text model `config` is one of the dense decoders that are written out here."""
    return config.model_type in _FUSED_TYPES and config.hidden_act == "silu"


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x [T, H, D]` by `cos, sin [T, 1, D / 2]`: the two halves of a head are the two axes of the rotation."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class FusedForward:
    """Llama-, Qwen2- and Qwen3-like dense decoders, on the transformers model's own parameters (no copies)."""

    media_ids: tuple[int, ...] = ()

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.model: Any = model
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        head = self.model.get_output_embeddings()
        return head.weight, head.bias

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        body = self.model.model
        x: Tensor = F.embedding(ids, body.embed_tokens.weight)
        cos, sin = body.rotary_emb(x[None], positions[None])
        half = self.head_dim // 2
        cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]
        for index, layer in enumerate(body.layers):
            x = x + self._attention(index, layer, x, cos, sin, attend)
            h = F.rms_norm(
                x, x.shape[-1:], layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon
            )
            mlp = layer.mlp
            gated = F.silu(F.linear(h, mlp.gate_proj.weight, mlp.gate_proj.bias))
            x = x + F.linear(
                gated * F.linear(h, mlp.up_proj.weight, mlp.up_proj.bias), mlp.down_proj.weight, mlp.down_proj.bias
            )
        return F.rms_norm(x, x.shape[-1:], body.norm.weight, body.norm.variance_epsilon)

    def _attention(self, index: int, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        at, norm = layer.self_attn, layer.input_layernorm
        h = F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
        q = F.linear(h, at.q_proj.weight, at.q_proj.bias).view(-1, self.num_heads, self.head_dim)
        k = F.linear(h, at.k_proj.weight, at.k_proj.bias).view(-1, self.num_kv_heads, self.head_dim)
        v = F.linear(h, at.v_proj.weight, at.v_proj.bias).view(-1, self.num_kv_heads, self.head_dim)
        if hasattr(at, "q_norm"):
            q = F.rms_norm(q, q.shape[-1:], at.q_norm.weight, at.q_norm.variance_epsilon)
            k = F.rms_norm(k, k.shape[-1:], at.k_norm.weight, at.k_norm.variance_epsilon)
        out = attend(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
        return F.linear(out.flatten(-2), at.o_proj.weight, at.o_proj.bias)


class TransformersForward:
    """Any transformers causal language model whose layers go through the attention interface."""

    media_ids: tuple[int, ...] = ()

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config()
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        use_flat_attention(self.model)

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        head = self.model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(self.model).__name__} has no vocabulary head: relax trains causal language models")
        return head.weight, getattr(head, "bias", None)

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        body = self.model.base_model
        out = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, relax_attend=attend)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden


def _flat_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[1, H, T, D]` in, `[1, T, H, D]` out."""
    attend: Attend | None = options.get("relax_attend")
    if attend is None:
        raise ModelError(f"{type(module).__name__} does not pass its keyword arguments on to the attention interface")
    scaling = options.get("scaling")
    if scaling is not None and abs(scaling - query.shape[-1] ** -0.5) > 1e-6:
        query = query * (scaling * query.shape[-1] ** 0.5)
    flat = [x[0].transpose(0, 1) for x in (query, key, value)]
    return attend(module.layer_idx, *flat)[None], None


def use_flat_attention(model: Any) -> None:
    """Has the layers of a transformers `model` call what is handed in as `relax_attend`."""
    # here, since importing transformers takes seconds that a check or a help page need not spend
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_INTERFACE, _flat_attention)
    AttentionMaskInterface.register(_INTERFACE, lambda *args, **options: None)
    model.set_attn_implementation(_INTERFACE)
