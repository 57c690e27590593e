"""From Whisper in CTranslate2's form to a folder that `from_pretrained` loads and relax trains, processor included."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from relax.data.transcripts import transcript_template
from relax.errors import ModelError

Weights = Mapping[str, NDArray[Any]]
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}  # by CTranslate2's numbers
_ENGLISH_ONLY = 51864  # tokens; models that know more languages have more of them
_TIMES = 1501  # the last tokens: 0.00 to 30.00 s
_POSITIONS, _PLACES_A_SECOND = "encoder/position_encodings/encodings", 50


def convert_whisper(source: Path, folder: Path, *, window_s: int | None = None) -> None:
    """Writes the Whisper in `source` (`model.bin`, `config.json`, `tokenizer.json`) to `folder` in float32, with its processor.

    `window_s`: how long it hears, instead of the 30 s that it was trained for, and which it hears worse without. Raises
    `ModelError` for a missing or unreadable file, another model, and quantized weights.
    """
    # here, since importing them takes seconds that a help page need not spend
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperProcessor, WhisperTokenizer

    for name in ("model.bin", "config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise ModelError(f"{source / name}: no such file; wanted a folder with a Whisper in CTranslate2's form")
    weights = dict(_read(source / "model.bin"))
    if window_s is not None and _POSITIONS in weights:
        weights[_POSITIONS] = weights[_POSITIONS][: window_s * _PLACES_A_SECOND]
    tokenizer: Any = WhisperTokenizer.from_pretrained(source, local_files_only=True)
    try:
        config = _config(weights, tokenizer)
        named = {name: torch.from_numpy(array.astype(np.float32)) for name, array in _renamed(weights, config)}
        named["proj_out.weight"] = named["model.decoder.embed_tokens.weight"]
        model = WhisperForConditionalGeneration(config)
        model.load_state_dict(named)
    except (KeyError, RuntimeError) as error:
        raise ModelError(f"{source / 'model.bin'}: its weights are not those of a Whisper: {error}") from error
    model.generation_config = _generation_config(json.loads((source / "config.json").read_text("utf-8")), config, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = transcript_template(folder)
    ears = WhisperFeatureExtractor(config.num_mel_bins, chunk_length=config.max_source_positions // _PLACES_A_SECOND)
    WhisperProcessor(ears, tokenizer).save_pretrained(folder)


def _read(file: Path) -> Weights:
    """All arrays of a `model.bin` by name. Raises `ModelError` for anything but floating-point weights of a Whisper."""
    try:
        with file.open("rb") as stream:
            (version,) = _numbers(stream, "I")
            kind = _text(stream) if version in (4, 5, 6) else "something else"
            if kind != "WhisperSpec":
                raise ModelError(f"{file}: not a Whisper in CTranslate2's form, but {kind}")
            _revision, count = _numbers(stream, "II")
            found = dict(_array(stream) for _ in range(count))
    except (struct.error, ValueError, KeyError) as error:
        raise ModelError(f"{file}: damaged: {error}") from error
    quantized = [name for name, array in found.items() if name.endswith("weight") and array.dtype.kind != "f"]
    if quantized:
        raise ModelError(f"{file}: its weights are quantized, and wanted are float16 or float32 ones")
    return found


def _array(stream: BinaryIO) -> tuple[str, NDArray[Any]]:
    name, (rank,) = _text(stream), _numbers(stream, "B")
    shape = _numbers(stream, f"{rank}I")
    kind, size = _numbers(stream, "BI")
    return name, np.frombuffer(stream.read(size), _TYPES[kind]).reshape(shape)


def _numbers(stream: BinaryIO, kinds: str) -> tuple[int, ...]:
    layout = struct.Struct(f"<{kinds}")
    return layout.unpack(stream.read(layout.size))


def _text(stream: BinaryIO) -> str:
    """Characters, of which the last is a zero, behind their number."""
    (length,) = _numbers(stream, "H")
    return stream.read(length)[:-1].decode()


def _config(weights: Weights, tokenizer: Any) -> Any:
    from transformers import WhisperConfig  # here, for the same reason as above

    vocabulary, width = weights["decoder/embeddings/weight"].shape
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    sizes = {}
    for part in ("encoder", "decoder"):
        layers = {name.split("/")[1] for name in weights if name.startswith(f"{part}/layer_")} - {"layer_norm"}
        sizes[f"{part}_layers"] = len(layers)
        sizes[f"{part}_attention_heads"] = int(weights[f"{part}/num_heads"])
        sizes[f"{part}_ffn_dim"] = weights[f"{part}/layer_0/ffn/linear_0/weight"].shape[0]
    return WhisperConfig(
        **sizes,
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=weights["encoder/conv1/weight"].shape[1],
        max_source_positions=len(weights["encoder/position_encodings/encodings"]),
        max_target_positions=len(weights["decoder/position_encodings/encodings"]),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
    )


def _generation_config(source: Mapping[str, Any], config: Any, tokenizer: Any) -> Any:
    """What transformers' own `generate` has to know."""
    from transformers import GenerationConfig  # here, for the same reason as above

    is_multilingual = config.vocab_size != _ENGLISH_ONLY
    first_time = config.vocab_size - _TIMES
    languages = {}
    if is_multilingual:
        tasks = {task: tokenizer.convert_tokens_to_ids(f"<|{task}|>") for task in ("transcribe", "translate")}
        languages = {
            "lang_to_id": {tokenizer.convert_ids_to_tokens(number): number for number in source["lang_ids"]},
            "task_to_id": tasks,
        }
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        max_length=config.max_target_positions,
        suppress_tokens=source.get("suppress_ids"),
        begin_suppress_tokens=source.get("suppress_ids_begin"),
        no_timestamps_token_id=first_time - 1,
        prev_sot_token_id=tokenizer.convert_tokens_to_ids("<|startofprev|>"),
        alignment_heads=source.get("alignment_heads"),
        is_multilingual=is_multilingual,
        **languages,
    )


def _renamed(weights: Weights, config: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """The weights by their names in transformers' model, fused projections taken apart."""

    def linear(new: str, old: str) -> Iterator[tuple[str, NDArray[Any]]]:
        yield f"{new}.weight", weights[f"{old}/weight"]
        yield f"{new}.bias", weights[f"{old}/bias"]

    def norm(new: str, old: str) -> Iterator[tuple[str, NDArray[Any]]]:
        yield f"{new}.weight", weights[f"{old}/gamma"]
        yield f"{new}.bias", weights[f"{old}/beta"]

    def fused(new: str, old: str, parts: str) -> Iterator[tuple[str, NDArray[Any]]]:
        for part, weight, bias in zip(
            parts, np.split(weights[f"{old}/weight"], len(parts)), np.split(weights[f"{old}/bias"], len(parts)), strict=True
        ):
            yield f"{new}.{part}_proj.weight", weight
            if part != "k":  # which has none in Whisper: zeros here
                yield f"{new}.{part}_proj.bias", bias

    for part in ("encoder", "decoder"):
        for index in range(getattr(config, f"{part}_layers")):
            new, old = f"model.{part}.layers.{index}", f"{part}/layer_{index}"
            yield from fused(f"{new}.self_attn", f"{old}/self_attention/linear_0", "qkv")
            yield from linear(f"{new}.self_attn.out_proj", f"{old}/self_attention/linear_1")
            yield from norm(f"{new}.self_attn_layer_norm", f"{old}/self_attention/layer_norm")
            if part == "decoder":
                yield from linear(f"{new}.encoder_attn.q_proj", f"{old}/attention/linear_0")
                yield from fused(f"{new}.encoder_attn", f"{old}/attention/linear_1", "kv")
                yield from linear(f"{new}.encoder_attn.out_proj", f"{old}/attention/linear_2")
                yield from norm(f"{new}.encoder_attn_layer_norm", f"{old}/attention/layer_norm")
            yield from linear(f"{new}.fc1", f"{old}/ffn/linear_0")
            yield from linear(f"{new}.fc2", f"{old}/ffn/linear_1")
            yield from norm(f"{new}.final_layer_norm", f"{old}/ffn/layer_norm")
        yield from norm(f"model.{part}.layer_norm", f"{part}/layer_norm")
        yield f"model.{part}.embed_positions.weight", weights[f"{part}/position_encodings/encodings"]
    yield "model.decoder.embed_tokens.weight", weights["decoder/embeddings/weight"]
    for name in ("conv1", "conv2"):
        yield from linear(f"model.encoder.{name}", f"encoder/{name}")
