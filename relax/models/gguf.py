"""From a GGUF file to a folder that `from_pretrained` loads and relax trains: weights dequantized, tokenizer included."""

import importlib.util
from pathlib import Path

from relax.errors import ModelError


def convert_gguf(file: Path, folder: Path, *, dtype: str = "float32") -> None:
    """Writes `file`'s model to `folder` as safetensors of `dtype` ("float32" or "bfloat16"), with its tokenizer and template.

    A quantized file loses nothing more here than it has lost already. Raises `ModelError` for a missing or unreadable file,
    an architecture that transformers does not convert, and where the `gguf` package is not installed.
    """
    if not file.is_file():
        raise ModelError(f"{file}: no such file; wanted a model in GGUF form")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file}: not a GGUF file, whatever its name says")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{file}: reading GGUF needs the package gguf: pip install 'relax-rl[gguf]'")
    # here, since importing them takes seconds that a help page need not spend
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
        )
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise ModelError(f"{file}: transformers cannot convert it: {error}") from error
    # What is written are plain weights: without these marks of where they came from they are saved and loaded as such.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
