"""A model whose attention relax does not compute is refused, with what is wrong with it."""

import pytest
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from relax.errors import ModelError
from relax.models.causal_lm import check_attention


@pytest.mark.parametrize(
    "config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), Qwen3MoeConfig(), MistralConfig(sliding_window=None)]
)
def test_full_attention_is_taken(config):
    check_attention(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (MistralConfig(sliding_window=4096, max_position_embeddings=8192), "looks back 4096 tokens"),
    ],
)
def test_other_attention_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        check_attention(config)
