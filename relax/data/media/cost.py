"""What media cost a model beside the tokens that stand for them, in tokens of its language model.

    a patch of an image or video, a frame of a sound:  products of its encoder's matrices / those of a token in the decoder

Attention itself is in neither: like the vocabulary's projection it depends on more than one row.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

RowCosts = Mapping[str, float]
"""By name of the features (`models/processor.py`): how many tokens of text one row of them is worth."""

_WHISPER_SIZES = frozenset(f"{part}_{size}" for part in ("encoder", "decoder") for size in ("layers", "ffn_dim")) | {
    "d_model",
    "num_mel_bins",
    "max_source_positions",
}


def row_costs(config: Mapping[str, Any]) -> RowCosts:
    """From the sizes in a model's `config.json`. An encoder whose sizes have names that are not known here costs nothing."""
    if config.get("model_type") == "whisper":
        return {"input_features": _sound(config)} if config.keys() >= _WHISPER_SIZES else {}
    core = config.get("thinker_config") or config
    vision, audio, token = core.get("vision_config"), core.get("audio_config"), _token(core.get("text_config") or {})
    costs = {}
    if vision and token:
        costs = dict.fromkeys(("pixel_values", "pixel_values_videos"), _patch(vision) / token)
    if audio and token:
        costs["input_features"] = _frame(audio) / token
    return {name: cost for name, cost in costs.items() if cost}


def media_cost(features: Mapping[str, NDArray[Any]], costs: RowCosts) -> float:
    """What the encoders do for a prompt with these features, in tokens of text."""
    return sum(cost * len(features[name]) for name, cost in costs.items() if name in features)


def _token(text: Mapping[str, Any]) -> float:
    """Multiplications of the decoder's layers for a token."""
    width, heads = text.get("hidden_size", 0), text.get("num_attention_heads", 0)
    depth = text.get("head_dim") or (width // heads if heads else 0)
    attention = 2 * width * depth * (heads + (text.get("num_key_value_heads") or heads))
    experts = text.get("num_experts_per_tok") or 0
    inner = experts * text.get("moe_intermediate_size", 0) if experts else text.get("intermediate_size", 0)
    return float(text.get("num_hidden_layers", 0) * (attention + 3 * width * inner))


def _patch(vision: Mapping[str, Any]) -> float:
    """Multiplications of a vision tower for a patch; its mergers work on `spatial_merge_size ** 2` of them at once."""
    width, inner = vision.get("hidden_size", 0), vision.get("intermediate_size", 0)
    gates = 3 if vision.get("hidden_act") == "silu" else 2  # a gated network has a third matrix
    blocks = vision.get("depth", 0) * (4 * width**2 + gates * width * inner)
    pixels = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 0) ** 2
    together = width * vision.get("spatial_merge_size", 2) ** 2
    mergers = (1 + len(vision.get("deepstack_visual_indexes") or ())) * width * (together + vision.get("out_hidden_size", 0))
    return float(blocks + pixels * width + mergers) if blocks else 0.0


def _sound(whisper: Mapping[str, Any]) -> float:
    """Of a whole sound, which is a row and always as long, in tokens that attend to it besides one another."""
    width, bins, depth = whisper["d_model"], whisper["num_mel_bins"], whisper["decoder_layers"]
    layers = whisper["encoder_layers"] * (4 * width**2 + 2 * width * whisper["encoder_ffn_dim"])
    place = layers + 3 * width * (2 * bins + width) + 2 * depth * width**2  # heard by each of the decoder's layers
    token = depth * (6 * width**2 + 2 * width * whisper["decoder_ffn_dim"])
    return float(whisper["max_source_positions"] * place / token)


def _frame(audio: Mapping[str, Any]) -> float:
    """Multiplications of an audio tower for a frame of the spectrogram: its convolutions leave one place of 8, or of 2."""
    width, bins, out = audio.get("d_model", 0), audio.get("num_mel_bins", 128), audio.get("output_dim", 0)
    layers = audio.get("encoder_layers", 0) * (4 * width**2 + 2 * width * audio.get("encoder_ffn_dim", 0))
    if not layers:
        return 0.0
    if channels := audio.get("downsample_hidden_size"):  # three convolutions halve time and bins; nine weights each
        narrow = 9 * channels * (bins / 4 + channels * bins / 16 + channels * bins / 64)
        return float(narrow + (channels * bins / 8 * width + layers + width * (width + out)) / 8)
    return float(3 * width * bins + (3 * width**2 + layers) / 2 + width * out / 4)
