"""A Hugging Face model folder as its files describe it: sizes without loading a weight, neither torch nor transformers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.config.model import ModelConfig
from relax.data.media.cost import RowCosts, row_costs
from relax.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_WHISPER_NAMES = {  # of what other models call by the names on the left
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "hidden_size": "d_model",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_target_positions",
}
_LONGEST_HEADER_BYTES = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What stands in `config.json`, the headers of the weights and the tokenizer's files. Sizes are 0 where not given.

    `media`: the kinds that the model reads beside text; `row_costs`: what they cost it.
    """

    path: Path
    tokenizer_path: Path
    model_type: str
    num_params: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    layer_types: tuple[str, ...]
    has_chat_template: bool
    media: tuple[str, ...] = ()
    row_costs: RowCosts = field(default_factory=dict)

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that the key-value cache holds for each token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_model_folder(model: ModelConfig) -> ModelFolder:
    """Reads the folder. Raises `ModelError` when it, its configuration, its weights or its tokenizer is missing or damaged."""
    path = Path(model.path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "there is no such folder"
        raise ModelError(f"model.path = {str(path)!r}: {what}; wanted a folder with config.json, safetensors and the tokenizer")
    config = _json(path / "config.json")
    text = (config.get("thinker_config") or config).get("text_config") or config
    if config.get("model_type") == "whisper":
        text = {name: config.get(own) for name, own in _WHISPER_NAMES.items()}
    heads = int(text.get("num_attention_heads") or 0)
    hidden = int(text.get("hidden_size") or 0)
    return ModelFolder(
        path=path,
        tokenizer_path=Path(model.tokenizer_path or path),
        model_type=str(config.get("model_type", "unknown")),
        num_params=_num_params(path),
        num_layers=int(text.get("num_hidden_layers") or 0),
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or (hidden // heads if heads else 0)),
        vocab_size=int(text.get("vocab_size") or 0),
        context=int(text.get("max_position_embeddings") or 0),
        layer_types=tuple(text.get("layer_types") or ()),
        has_chat_template=_has_chat_template(
            Path(model.tokenizer_path or path), "tokenizer" if model.tokenizer_path else "model"
        ),
        media=_media(config.get("thinker_config") or config),
        row_costs=row_costs(config),
    )


def longest_sequence(model: ModelConfig) -> int:
    """Tokens that the model reads at most, as the run says or else as the folder says."""
    return model.max_context or read_model_folder(model).context or 1 << 30


def _media(config: Mapping[str, Any]) -> tuple[str, ...]:
    seen = ("image", "video") if config.get("vision_config") else ()
    return (*seen, "audio") if config.get("audio_config") or config.get("model_type") == "whisper" else seen


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}: wanted a folder as save_pretrained writes it")
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds {type(content).__name__}, wanted an object")
    return content


def _num_params(path: Path) -> int:
    index = path / "model.safetensors.index.json"
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        wanted = sorted({path / name for name in _json(index).get("weight_map", {}).values()})
        missing = [file.name for file in wanted if not file.is_file()]
        if missing:
            raise ModelError(f"{index} names {', '.join(missing)}, which {path} does not have: the download is not complete")
        files = wanted
    if not files:
        other = next(path.glob("pytorch_model*.bin"), None)
        hint = f"; it has {other.name}: save it again as safetensors" if other else ""
        raise ModelError(f"{path} has no weights: wanted model.safetensors{hint}")
    return sum(_params_in(file) for file in files)


def _params_in(file: Path) -> int:
    """From the header of a safetensors file: 8 bytes of length, then JSON with every tensor's shape."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _LONGEST_HEADER_BYTES:
                raise ValueError("no safetensors header")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if file.stat().st_size < 8 + length + max(ends, default=0):
            raise ValueError("it is shorter than its header says")
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"{file}: damaged: {error}") from error


def _has_chat_template(path: Path, kind: str) -> bool:
    if not path.is_dir() or not any((path / name).is_file() for name in _TOKENIZER_FILES):
        hint = "put the tokenizer's files there, or set model.tokenizer_path" if kind == "model" else "set model.tokenizer_path"
        raise ModelError(f"{path} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}): {hint}")
    if any((path / name).is_file() for name in _TEMPLATE_FILES):
        return True
    settings = path / "tokenizer_config.json"
    return settings.is_file() and bool(_json(settings).get("chat_template"))
