"""A model folder, loaded for training, with errors that say what is missing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relax.config.model import ModelConfig
from relax.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def load_model(config: ModelConfig, device: torch.device) -> Any:
    """The causal language model at `model.path`, in `model.dtype` on `device`.

    Raises `ModelError` for a missing folder, config, tokenizer or weights, an architecture that is not a causal language model,
    and weights that do not fill the model or do not fit it. Nothing is downloaded.
    """
    # here, since importing transformers takes seconds that a check or a help page need not spend
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    folder = Path(config.path)
    _check_folder(folder, config)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, config.dtype),
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"model.path = {config.path!r} cannot be loaded as a causal language model: {error}") from error
    for what, names in (("without weights in the folder", info["missing_keys"]), ("of another shape", info["mismatched_keys"])):
        if names:
            shown = ", ".join(sorted(str(name) for name in names)[:5])
            raise ModelError(f"model.path = {config.path!r}: {len(names)} parameter(s) {what}: {shown}")
    return model.to(device)


def _check_folder(folder: Path, config: ModelConfig) -> None:
    if not folder.is_dir():
        raise ModelError(f"model.path = {config.path!r}: no such folder; it takes a local Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path = {config.path!r}: no config.json in it; it takes a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"model.path = {config.path!r}: no weights in it (*.safetensors)")
    tokenizer = tokenizer_folder(config)
    if not any((tokenizer / name).is_file() for name in _TOKENIZER_FILES):
        key = "model.tokenizer_path" if config.tokenizer_path else "model.path"
        raise ModelError(
            f"{key} = {str(tokenizer)!r}: no tokenizer in it (tokenizer.json); model.tokenizer_path may name another"
        )


def tokenizer_folder(config: ModelConfig) -> Path:
    """Where the tokenizer's files are."""
    return Path(config.tokenizer_path or config.path)


def start_recomputing(model: Any) -> None:
    """Turns on transformers' recomputation of activations, which works in training mode only: so dropout goes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by Hugging Face name; a tensor that has several names under the first one only."""
    names = set(model.state_dict().keys())
    seen: set[int] = set()
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if name in names and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
