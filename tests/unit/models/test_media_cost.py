"""What media cost is what encoders multiply: the sizes in `config.json` against counted operations."""

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMultimodalLM, AutoModelForSpeechSeq2Seq

from relax.data.media.cost import media_cost, row_costs
from relax.models.omni_lm import OmniForward
from relax.models.tiny_whisper import build_tiny_whisper
from relax.models.whisper import WhisperForward

SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_omni", "qwen2_5_omni")]
TOKENS, PATCHES, FRAMES = 40, 64, 400


def count(call) -> int:
    """Operations of all products but attention's."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    found = counter.get_flop_counts()["Global"]
    return sum(
        number for operation, number in found.items() if "attention" not in str(operation) and "bmm" not in str(operation)
    )


@pytest.mark.parametrize("family", ["qwen3_vl", *SLOW])
def test_a_row_costs_what_its_encoder_multiplies(tiny_omni, family) -> None:
    folder = tiny_omni(family)
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    model.set_experts_implementation("eager")  # whose products are counted
    forward, costs = OmniForward(model), row_costs(json.loads((folder / "config.json").read_text()))
    patch = 3 * 2 * getattr(model, "thinker", model).config.vision_config.patch_size ** 2
    image = {"pixel_values": torch.randn(PATCHES, patch), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    sound = {"input_features": torch.randn(FRAMES, 128), "audio_lengths": [FRAMES]}
    token = (
        count(lambda: forward.hidden(torch.arange(20, 20 + TOKENS), torch.arange(TOKENS), lambda layer, q, k, v: q)) / TOKENS
    )
    assert costs["pixel_values"] == costs["pixel_values_videos"]
    assert count(lambda: forward.encode(image)) / token == pytest.approx(PATCHES * costs["pixel_values"], rel=0.03)
    assert ("input_features" in costs) == ("omni" in family)
    if "omni" in family:  # the last window is filled up
        assert count(lambda: forward.encode(sound)) / token == pytest.approx(FRAMES * costs["input_features"], rel=0.03)


@pytest.mark.slow
def test_a_whole_sound_is_a_row_of_whisper(tmp_path) -> None:
    build_tiny_whisper(tmp_path)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path).eval()
    forward, costs = WhisperForward(model), row_costs(json.loads((tmp_path / "config.json").read_text()))
    sound = {"input_features": np.zeros((1, 20, 200), np.float32)}
    heard = forward.join([(forward.encode(sound), TOKENS)])
    ids, places = torch.arange(20, 20 + TOKENS), torch.arange(TOKENS)
    token = count(lambda: forward.hidden(ids, places, lambda layer, q, k, v: q, heard)) / TOKENS
    assert count(lambda: forward.encode(sound)) / token == pytest.approx(media_cost(sound, costs), rel=0.01)


def test_features_are_counted_by_row_and_text_costs_nothing() -> None:
    costs = {"pixel_values": 0.25, "input_features": 0.5}
    features = {"pixel_values": np.zeros((8, 3)), "image_grid_thw": np.zeros((1, 3)), "input_features": np.zeros((6, 2))}
    assert media_cost(features, costs) == 5.0
    assert media_cost({}, costs) == media_cost(features, {}) == 0.0
    assert row_costs({"hidden_size": 64, "num_hidden_layers": 2}) == {}
    assert row_costs({"text_config": {"hidden_size": 64}, "vision_config": {"depth": 2}}) == {}, "sizes that are not known"
