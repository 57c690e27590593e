"""What Whisper is asked, and what a folder in CTranslate2's form becomes: transformers' own prompts, features and weights."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, WhisperForConditionalGeneration

from relax.config.data import DataSection
from relax.config.model import ModelConfig
from relax.data.media.decoded import Audio
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.errors import DataError, ModelError
from relax.models.ctranslate2 import convert_whisper
from relax.models.folder import read_model_folder
from relax.models.forward import make_forward
from relax.models.whisper_processor import WhisperReader, load_processor
from tests.omni_prompts import image, messages, sound


@pytest.fixture
def case(tiny_omni):
    reader = load_processor(tiny_omni("whisper"))
    assert isinstance(reader, WhisperReader)
    return SimpleNamespace(folder=tiny_omni("whisper"), reader=reader, own=AutoProcessor.from_pretrained(tiny_omni("whisper")))


def rendered(reader, *content, said=None, **options):
    turns = [*messages(*content), *([] if said is None else [{"role": "assistant", "content": said}])]
    return Renderer(reader.tokenizer, DataSection(template_options=options)).rendered(turns)


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_prompts_and_features_are_transformers_own(case, seconds) -> None:
    heard = sound(seconds)
    found = case.reader.prepare(rendered(case.reader, heard), [heard])
    assert found.ids.tolist() == case.own.tokenizer("").input_ids[:-1], "all but the end of the text"
    own = case.own(heard.samples, sampling_rate=16000, return_tensors="np").input_features
    assert np.array_equal(found.features["input_features"], own)
    before = case.reader.prepare(rendered(case.reader, heard, "Mr. Smith"), [heard])
    assert before.ids.tolist() == [*case.own.tokenizer.get_prompt_ids("Mr. Smith"), *found.ids]


def test_a_transcript_follows_its_prompt_and_a_mark_that_is_spelled_out_is_text(case) -> None:
    renderer, heard = Renderer(case.reader.tokenizer, DataSection()), sound()
    turns = [*messages(heard), {"role": "assistant", "content": " seven "}]
    ids, mask = renderer.render_chat(turns)
    text, asked = case.own.tokenizer(" seven").input_ids, case.reader.prepare(rendered(case.reader, heard), [heard]).ids
    assert ids == text
    assert mask == [0] * len(asked) + [1] * (len(text) - len(asked)), "the end of the text is learned"
    marked = case.reader.prepare(rendered(case.reader, heard, "<|notimestamps|>"), [heard])
    assert (marked.ids == asked[-1]).sum() == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (("Hello",), "there are 0 sounds"),
        ((sound(), sound()), "there are 2 sounds"),
        ((sound(), image()), "has type image"),
    ],
)
def test_prompts_without_one_sound_are_refused(case, content, message) -> None:
    with pytest.raises(DataError, match=message):
        rendered(case.reader, *content)


def test_a_transcript_ends_the_conversation(case) -> None:
    turns = [*messages(sound()), {"role": "assistant", "content": "seven"}, {"role": "user", "content": "again"}]
    with pytest.raises(DataError, match="something follows it"):
        Renderer(case.reader.tokenizer, DataSection()).rendered(turns)


@pytest.mark.parametrize(
    ("heard", "message"),
    [
        ([sound(2.1)], r"lasts 2\.1 s, and the model hears 2 s"),
        ([Audio(np.zeros(800, np.float32), 8000)], "8000 samples a second, the model hears 16000"),
        ([image()], "hears one sound"),
        ([], "the prompt has 0 media"),
    ],
)
def test_sounds_that_do_not_fit_are_refused(case, heard, message) -> None:
    with pytest.raises(DataError, match=message):
        case.reader.prepare(rendered(case.reader, sound()), heard)


def test_a_model_of_many_languages_is_told_which(case, tmp_path) -> None:
    for file in case.folder.iterdir():
        if file.name != "chat_template.jinja":  # as published folders are
            (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"is_multilingual": True}))
    reader, tokenizer = load_processor(tmp_path), load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert tokenizer.chat_template == reader.tokenizer.chat_template
    heard = sound()
    for task in ("transcribe", "translate"):
        case.own.tokenizer.set_prefix_tokens(language="en", task=task)
        found = reader.prepare(rendered(reader, heard, task=task), [heard])
        assert found.ids.tolist() == case.own.tokenizer("").input_ids[:-1]
    with pytest.raises(DataError, match=r"no tokens for the language or task in .*<\|xx\|>"):
        reader.prepare(rendered(reader, heard, language="xx"), [heard])


def test_a_folder_says_what_it_is(case) -> None:
    found = read_model_folder(ModelConfig(path=str(case.folder)))
    assert (found.media, found.context, found.num_layers, found.head_dim) == (("audio",), 128, 3, 16)


# -- CTranslate2 ----------------------------------------------------------------------------------------------------------


def fused(state, name, parts):
    """Projections below one another, zeros in the place of the key's bias."""
    weights = [state[f"{name}.{part}_proj.weight"] for part in parts]
    zeros = torch.zeros(len(weights[0]))
    return torch.cat(weights), torch.cat([state.get(f"{name}.{part}_proj.bias", zeros) for part in parts])


def as_ctranslate2(model) -> dict[str, np.ndarray]:
    state, found = model.state_dict(), {}

    def pair(new, weight, bias, names=("weight", "bias")):
        found[f"{new}/{names[0]}"], found[f"{new}/{names[1]}"] = weight, bias

    def copy(new, old, names=("weight", "bias")):
        pair(new, state[f"{old}.weight"], state[f"{old}.bias"], names)

    norm = ("gamma", "beta")
    for part in ("encoder", "decoder"):
        for index in range(getattr(model.config, f"{part}_layers")):
            new, old = f"{part}/layer_{index}", f"model.{part}.layers.{index}"
            pair(f"{new}/self_attention/linear_0", *fused(state, f"{old}.self_attn", "qkv"))
            copy(f"{new}/self_attention/linear_1", f"{old}.self_attn.out_proj")
            copy(f"{new}/self_attention/layer_norm", f"{old}.self_attn_layer_norm", norm)
            if part == "decoder":
                pair(f"{new}/attention/linear_0", *fused(state, f"{old}.encoder_attn", "q"))
                pair(f"{new}/attention/linear_1", *fused(state, f"{old}.encoder_attn", "kv"))
                copy(f"{new}/attention/linear_2", f"{old}.encoder_attn.out_proj")
                copy(f"{new}/attention/layer_norm", f"{old}.encoder_attn_layer_norm", norm)
            copy(f"{new}/ffn/linear_0", f"{old}.fc1")
            copy(f"{new}/ffn/linear_1", f"{old}.fc2")
            copy(f"{new}/ffn/layer_norm", f"{old}.final_layer_norm", norm)
        copy(f"{part}/layer_norm", f"model.{part}.layer_norm", norm)
        found[f"{part}/position_encodings/encodings"] = state[f"model.{part}.embed_positions.weight"]
        found[f"{part}/num_heads"] = np.array(getattr(model.config, f"{part}_attention_heads"), np.int16)
    found["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    for name in ("conv1", "conv2"):
        copy(f"encoder/{name}", f"model.encoder.{name}")
    return {name: np.asarray(array) for name, array in found.items()}


def write(path: Path, arrays: dict[str, np.ndarray], kind: str = "WhisperSpec") -> None:
    """`model.bin` of version 6."""
    numbers = {"float32": 0, "int8": 1, "int16": 2}

    def text(words: str) -> bytes:
        return struct.pack("<H", len(words) + 1) + words.encode() + b"\0"

    out = struct.pack("<I", 6) + text(kind) + struct.pack("<II", 3, len(arrays))
    for name, array in arrays.items():
        out += text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        out += struct.pack("<BI", numbers[array.dtype.name], array.nbytes) + array.tobytes()
    path.write_bytes(out + struct.pack("<I", 0))


@pytest.fixture
def source(case, tmp_path):
    """The tiny model in CTranslate2's form."""
    folder = tmp_path / "ct2"
    folder.mkdir()
    model = WhisperForConditionalGeneration.from_pretrained(case.folder)
    arrays = as_ctranslate2(model)
    write(folder / "model.bin", arrays)
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [3], "lang_ids": [258]}))
    (folder / "tokenizer.json").write_bytes((case.folder / "tokenizer.json").read_bytes())
    return SimpleNamespace(folder=folder, model=model, arrays=arrays)


def test_a_converted_folder_is_the_same_model(case, source, tmp_path) -> None:
    convert_whisper(source.folder, tmp_path / "out")
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
    wanted, found = source.model.state_dict(), model.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    same = ("d_model", "encoder_layers", "decoder_ffn_dim", "max_target_positions", "eos_token_id", "decoder_start_token_id")
    assert all(getattr(model.config, name) == getattr(source.model.config, name) for name in same)
    assert model.generation_config.suppress_tokens == [1, 2]
    processor = WhisperReader(tmp_path / "out")
    assert processor.tokenizer("seven").input_ids == case.own.tokenizer("seven").input_ids
    assert processor.tokenizer.pad_token_id == processor.tokenizer.eos_token_id


def test_a_shorter_window_is_heard_as_the_beginning_of_the_longer_one(source, tmp_path) -> None:
    convert_whisper(source.folder, tmp_path / "out", window_s=1)
    model, reader = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out"), WhisperReader(tmp_path / "out")
    places = model.model.encoder.embed_positions.weight
    assert torch.equal(places, source.model.model.encoder.embed_positions.weight[:50])
    heard = reader.prepare(rendered(reader, sound(1.0)), [sound(1.0)])
    assert make_forward(model).encode(heard.features)[0][0].shape == (4, 50, 16)
    with pytest.raises(DataError, match=r"lasts 1\.1 s, and the model hears 1 s"):
        reader.prepare(rendered(reader, sound(1.1)), [sound(1.1)])


def test_what_is_no_whisper_or_not_whole_is_refused(source, tmp_path) -> None:
    with pytest.raises(ModelError, match=r"model\.bin: no such file"):
        convert_whisper(tmp_path, tmp_path / "out")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((source.folder / name).read_bytes())
    whole = (source.folder / "model.bin").read_bytes()
    for content, message in ((whole[:5000], "damaged"), (b"PK\3\4 a zip", "something else")):
        (tmp_path / "model.bin").write_bytes(content)
        with pytest.raises(ModelError, match=message):
            convert_whisper(tmp_path, tmp_path / "out")
    write(tmp_path / "model.bin", source.arrays, "TransformerSpec")
    with pytest.raises(ModelError, match="but TransformerSpec"):
        convert_whisper(tmp_path, tmp_path / "out")
    name = "encoder/layer_0/ffn/linear_0/weight"
    write(tmp_path / "model.bin", source.arrays | {name: source.arrays[name].astype(np.int8)})
    with pytest.raises(ModelError, match="quantized"):
        convert_whisper(tmp_path, tmp_path / "out")
    write(tmp_path / "model.bin", {k: v for k, v in source.arrays.items() if k != "encoder/conv1/bias"})
    with pytest.raises(ModelError, match="encoder/conv1/bias"):
        convert_whisper(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
