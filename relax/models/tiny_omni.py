"""Tiny models that see and hear, built on the spot: random weights, the processors of the real ones. No download.

A folder holds what a real one of its family holds, so that `AutoProcessor` and `AutoModelForMultimodalLM` load it. Of the omni
models there is what reads and writes, the thinker, without the parts that speak: Qwen3-Omni's inside of the whole model's
layout, as checkpoints have it, and Qwen2.5-Omni's by itself, since the whole one asks for its speakers' voices. Whisper is a
small world of its own (`models/tiny_whisper.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from relax.models.tiny import END, PAD, make_tokenizer
from relax.models.tiny_whisper import build_tiny_whisper

Family = Literal["qwen3_vl", "qwen3_vl_moe", "qwen3_omni", "qwen2_5_omni", "whisper"]

# What `model.build` of relax sft names, beside the sizes of `models/tiny.py`.
FAMILIES: Mapping[str, Family] = {"tiny-vl": "qwen3_vl", "tiny-omni": "qwen3_omni", "tiny-whisper": "whisper"}

NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_token": "<|audio_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

# The turns of a chat; each image, video and clip stands for itself between its two marks.
CHAT_TEMPLATE = """\
{%- macro part(item) -%}
{%- if item.type == 'text' -%}{{ item.text }}
{%- elif item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif item.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif item.type == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- else -%}{{ raise_exception('a part of a message has type ' ~ item.type ~ '; known are text, image, video, audio') }}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for item in message.content -%}{{ part(item) }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

_WIDTH, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _CONTEXT = 64, 3, 4, 2, 32, 4096
_PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}


def build_tiny_omni(folder: str | Path, family: Family, *, seed: int = 0, vocab_size: int = 512) -> None:
    """Writes a model of `family` with random float32 weights, fixed by `seed`, and its processor to `folder`."""
    if family == "whisper":
        build_tiny_whisper(folder, seed=seed)
        return
    # here, since importing them takes seconds that a check or a help page need not spend
    import torch
    from transformers import AutoModelForMultimodalLM, GenerationConfig

    tokenizer = make_tokenizer(vocab_size, _CONTEXT, NAMED_TOKENS, CHAT_TEMPLATE)
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    config = _config(family, tokenizer)
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to change
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=end, pad_token_id=pad)
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _processor(family, tokenizer).save_pretrained(folder)


def _config(family: Family, tokenizer: Any) -> Any:
    # here, for the same reason as above
    from transformers import Qwen2_5OmniThinkerConfig, Qwen3OmniMoeConfig, Qwen3VLConfig, Qwen3VLMoeConfig

    is_moe, is_2_5 = family in ("qwen3_vl_moe", "qwen3_omni"), family == "qwen2_5_omni"
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": _CONTEXT,
        "rope_parameters": rope if is_2_5 else rope | {"mrope_interleaved": True},
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if is_2_5:
        text |= {"rope_parameters": rope | {"mrope_section": [4, 2, 2]}}  # its heads are hidden_size / num_attention_heads wide
    else:
        text |= {"head_dim": _HEAD_DIM}
    if is_moe:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 14 if is_2_5 else 16,
        "out_hidden_size": _WIDTH,
    }
    vision |= {"fullatt_block_indexes": [1]} if is_2_5 else {"num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}
    ids = {
        f"{name.replace('bos', 'start').replace('eos', 'end')}_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in NAMED_TOKENS.items()
    }
    if not family.endswith("omni"):
        ids = {name: token for name, token in ids.items() if not name.startswith("audio")}
        kind = Qwen3VLMoeConfig if is_moe else Qwen3VLConfig
        return kind(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    audio = {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "output_dim": _WIDTH,
    } | ({} if is_2_5 else {"downsample_hidden_size": 16})
    thinker = {"text_config": text, "vision_config": vision, "audio_config": audio, **ids}
    if is_2_5:
        return Qwen2_5OmniThinkerConfig(**thinker)
    return Qwen3OmniMoeConfig(thinker_config=thinker | {"position_id_per_seconds": 13}, enable_audio_output=False)


def _processor(family: Family, tokenizer: Any) -> Any:
    # here, for the same reason as above
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
        Qwen3OmniMoeProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    patches = {"patch_size": 14 if family == "qwen2_5_omni" else 16, "temporal_patch_size": 2, "merge_size": 2}
    images = Qwen2VLImageProcessor(**patches, size=_PIXELS, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    if not family.endswith("omni"):
        pixels = {"shortest_edge": 2 * 64 * 64, "longest_edge": 16 * 256 * 256}  # of all frames together
        videos = Qwen3VLVideoProcessor(**patches, size=pixels, cap_pixels_per_frame=False)
        return Qwen3VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)
    videos = Qwen2VLVideoProcessor(
        **patches, size=_PIXELS, image_mean=[0.5] * 3, image_std=[0.5] * 3, cap_pixels_per_frame=False
    )
    sounds = WhisperFeatureExtractor(feature_size=128, sampling_rate=16000, return_attention_mask=True)
    kind = Qwen2_5OmniProcessor if family == "qwen2_5_omni" else Qwen3OmniMoeProcessor
    return kind(images, videos, sounds, tokenizer, chat_template=CHAT_TEMPLATE)
