"""The forward pass that fits a model, and the tokens that prove two copies of its weights equal."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.models.causal_lm import FlatForward, FusedForward, TransformersForward, check_attention, is_fusable
from relax.models.omni_lm import OmniForward, is_omni, is_whisper
from relax.models.whisper import WhisperForward

_NUM_CANARY_TOKENS = 16


def make_forward(model: Any, *, use_fused: bool = True) -> FlatForward:
    """The fastest forward that fits `model`, a transformers decoder with whatever head, or one that sees and hears as well.

    Raises `ModelError` for a model whose layers are not all attention layers.
    """
    config = model.config.get_text_config()
    check_attention(config)
    if is_whisper(model.config):
        return WhisperForward(model)
    if is_omni(model.config):
        return OmniForward(model)
    return FusedForward(model) if use_fused and is_fusable(config) else TransformersForward(model)


def canary_tokens(forward: FlatForward) -> NDArray[np.int32]:
    """Tokens that the vocabulary fixes, none of media."""
    vocabulary = len(forward.head[0])
    tokens = np.random.default_rng(vocabulary).integers(0, vocabulary, _NUM_CANARY_TOKENS).astype(np.int32)
    while (of_media := np.isin(tokens, forward.media_ids)).any():
        tokens[of_media] = (tokens[of_media] + 1) % vocabulary
    return tokens
