"""Tiny models that see and hear are folders like any other, and building one twice gives the same bytes."""

import hashlib
import json

import pytest
from transformers import AutoModelForMultimodalLM, AutoProcessor

from relax.models.tiny_omni import NAMED_TOKENS, build_tiny_omni

CLASSES = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLProcessor"),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLProcessor"),
    "qwen3_omni": ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeProcessor"),
    "qwen2_5_omni": ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2_5OmniProcessor"),
}


FAMILIES = [pytest.param(family, marks=() if family == "qwen3_vl" else pytest.mark.slow) for family in CLASSES]


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_classes_load_the_folder(tiny_omni, family) -> None:
    model, info = AutoModelForMultimodalLM.from_pretrained(tiny_omni(family), output_loading_info=True)
    processor = AutoProcessor.from_pretrained(tiny_omni(family))
    assert (type(model).__name__, type(processor).__name__) == CLASSES[family]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sum(weight.numel() for weight in model.parameters()) < 1.5e6
    assert all(len(processor.tokenizer(token).input_ids) == 1 for token in NAMED_TOKENS.values())
    config = json.loads((tiny_omni(family) / "config.json").read_text())
    assert ("thinker_config" in config) == (family == "qwen3_omni")  # as its checkpoints have it


@pytest.mark.slow
def test_building_twice_gives_the_same_bytes(tiny_omni, tmp_path) -> None:
    build_tiny_omni(tmp_path / "again", "qwen3_vl")

    def digest(folder):
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}

    assert digest(tmp_path / "again") == digest(tiny_omni("qwen3_vl"))
