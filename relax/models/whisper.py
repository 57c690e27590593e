"""The flat forward pass of Whisper: a decoder whose tokens see one another, and hear the whole of their own prompt's sound.

    features --encoder, once a prompt--> states [S, d] --keys and values of each layer--> Sound --+
    ids [T] --embed, learned positions--> layers: self attention (attend), cross attention <------+--> hidden [T, d]

A sound stands in no token's place: it is there for every token after it as well, those that are still to be written included.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax.errors import ModelError
from relax.models.causal_lm import Attend
from relax.models.omni_lm import Features, as_tensor

Sound = Sequence[tuple[Tensor, Tensor]]  # of each layer of the decoder: keys and values [H, S, D]
Heard = Sequence[tuple[Sound, int]]  # sounds, and how many tokens, from those before on, hear each

_DROPOUTS = ("dropout", "activation_dropout", "layerdrop")


class WhisperForward:
    """A `MediaForward` on the transformers model's own parameters. Nobody may write the tokens above the end of the text:
    those of languages, tasks and times, which Whisper's vocabularies have there."""

    hears_throughout = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model = model
        self._encoder, self._decoder = model.model.encoder, model.model.decoder
        self.num_layers = int(config.decoder_layers)
        self.num_heads = self.num_kv_heads = int(config.decoder_attention_heads)
        self.head_dim = int(config.d_model) // self.num_heads
        self.media_ids = tuple(range(int(config.eos_token_id) + 1, int(config.vocab_size)))
        self._shape = (1, int(config.num_mel_bins), 2 * int(config.max_source_positions))
        for module in model.modules():  # recomputation works in training mode alone, and these are no modules that could go
            for name in _DROPOUTS:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        return self.model.proj_out.weight, None

    # -- the sound ----------------------------------------------------------------------------------------------------
    def encode(self, features: Features) -> Sound:
        """The one sound of a prompt, with a graph where gradients are enabled. Raises `ModelError` where there is none."""
        given = as_tensor(features["input_features"]) if "input_features" in features else torch.zeros(0)
        if tuple(given.shape) != self._shape:
            raise ModelError(f"the model hears one spectrogram {list(self._shape)}, and is given {list(given.shape)}")
        weight = self._decoder.embed_tokens.weight
        states = self._encoder(given.to(weight.device, weight.dtype)).last_hidden_state[0]
        layers = [layer.encoder_attn for layer in self._decoder.layers]
        return [
            (self._heads(at.k_proj(states)).transpose(0, 1), self._heads(at.v_proj(states)).transpose(0, 1)) for at in layers
        ]

    def encode_prompt(self, ids: Sequence[int] | np.ndarray[Any, Any], features: Features) -> Sound:
        """The sound of one prompt, whatever its ids are."""
        return self.encode(features)

    def encode_packed(self, prompts: Sequence[tuple[Features | None, int]]) -> Heard | None:
        """What is heard in prompts that lie end to end, given with how many tokens theirs are."""
        return self.join([(self.encode(features) if features else None, count) for features, count in prompts])

    def join(self, parts: Sequence[tuple[Sound | None, int]]) -> Heard | None:
        """Sounds of tokens that lie end to end; a model that hears nothing is a language model, as canaries have it.

        Raises `ModelError` where some tokens have a sound and others none.
        """
        if all(sound is None for sound, _ in parts):
            return None
        found = []
        for _, same in groupby(parts, key=lambda part: id(part[0])):
            run = list(same)
            sound = run[0][0]
            if sound is None:
                raise ModelError("a prompt has no sound, and the model writes down what it hears")
            found.append((sound, sum(count for _, count in run)))
        return found

    def touch(self, seen: Heard | None = None) -> Tensor:
        """Zero: with a sound in each prompt, all micro-batches reach the same parameters. Raises `ModelError` otherwise."""
        if seen is None:
            raise ModelError("no row has a sound, and the model learns to write down what it hears: set data.media")
        zero: Tensor = self._decoder.embed_tokens.weight.new_zeros(())
        return zero

    def positions(self, ids: Sequence[int] | np.ndarray[Any, Any], features: Features | None) -> tuple[Tensor, float]:
        """`[3, P]`, three times where tokens stand among tokens, and 0."""
        return torch.arange(len(ids), dtype=torch.float32).expand(3, -1), 0.0

    # -- the text -----------------------------------------------------------------------------------------------------
    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, encoded: Heard | None = None) -> Tensor:
        """`ids [T]`, `positions [3, T]` or `[T]` -> `[T, d]`, after the final norm."""
        places = positions if positions.ndim == 1 else positions[0]
        x: Tensor = self._decoder.embed_tokens(ids) + self._decoder.embed_positions.weight[places.long()]
        for index, layer in enumerate(self._decoder.layers):
            at, h = layer.self_attn, layer.self_attn_layer_norm(x)
            q, k, v = (self._heads(project(h)) for project in (at.q_proj, at.k_proj, at.v_proj))
            x = x + at.out_proj(attend(index, q, k, v).flatten(-2))
            if encoded is not None:
                q = self._heads(layer.encoder_attn.q_proj(layer.encoder_attn_layer_norm(x)))
                x = x + layer.encoder_attn.out_proj(_listen(index, q, encoded).flatten(-2))
            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        hidden: Tensor = self._decoder.layer_norm(x)
        return hidden

    def _heads(self, x: Tensor) -> Tensor:
        """`[n, d]` -> `[n, H, D]`."""
        return x.view(-1, self.num_heads, self.head_dim)


def _listen(layer: int, q: Tensor, heard: Heard) -> Tensor:
    """Each token's cross attention, `q [T, H, D]` -> `[T, H, D]`: tokens of one sound are queries of one product."""
    out = []
    for (sound, _), queries in zip(heard, torch.split(q, [count for _, count in heard]), strict=True):
        keys, values = sound[layer]
        mixed = F.scaled_dot_product_attention(queries.transpose(0, 1)[None], keys[None], values[None])
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)
