"""A model folder, loaded for training, with errors that say what is missing."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from relax.config.model import ModelConfig
from relax.errors import ModelError
from relax.models.omni_lm import WITHOUT_SPEECH, auto_class, is_omni
from relax.models.scalar_omni import scalar_class

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


# What reads the hidden states: the vocabulary, or numbers for the whole sequence or for each token.
Head = Literal["vocabulary", "sequence", "token"]
_KINDS = {
    "vocabulary": ("AutoModelForCausalLM", "a causal language model"),
    "sequence": ("AutoModelForSequenceClassification", "a sequence classifier"),
    "token": ("AutoModelForTokenClassification", "a token classifier"),
}


def load_model(config: ModelConfig, device: torch.device, head: Head = "vocabulary") -> Any:
    """The model at `model.path` with this head, in `model.dtype` on `device`.

    Raises `ModelError` for a missing folder, config, tokenizer or weights, an architecture that has no such head, and weights
    that do not fill the model or do not fit it. Nothing is downloaded.
    """
    model, missing = _load(config, head)
    _refuse(config, "without weights in the folder", missing)
    return model.to(device)


def load_scalar_model(config: ModelConfig, device: torch.device, head: Head) -> Any:
    """The model at `model.path` with a head for one number, which says 0 where the folder has none: a language model's, or for
    the bias that only heads of tokens have. The head is float32. Raises `ModelError` as `load_model` does."""
    # here, since importing transformers takes seconds that a check or a help page need not spend
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # a head that is missing is no news here
    try:
        model, missing = _load(config, head, num_labels=1)
    finally:
        logging.set_verbosity(before)
    if not hasattr(model, "score"):
        raise ModelError(f"model.path = {config.path!r}: {type(model).__name__} calls its head by another name than 'score'")
    model.score.float()
    for name, parameter in model.score.named_parameters():
        if f"score.{name}" in missing:
            missing.remove(f"score.{name}")
            nn.init.zeros_(parameter)
    _refuse(config, "without weights in the folder", missing)
    return model.to(device)


def _load(config: ModelConfig, head: Head, **options: Any) -> tuple[Any, set[str]]:
    """The model, and the names of parameters that the folder has no weights for."""
    # here, since importing transformers takes seconds that a check or a help page need not spend
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    folder, (name, kind) = Path(config.path), _KINDS[head]
    _check_folder(folder, config)
    try:
        found = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=config.trust_remote_code, **WITHOUT_SPEECH, **options
        )
        loader: Any = getattr(transformers, name)
        if is_omni(found):
            options, loader = {"config": found}, getattr(transformers, auto_class(found))
            if head != "vocabulary":
                loader = scalar_class(found, name.removeprefix("AutoModelFor"), has_bias=head == "token")
        model, info = loader.from_pretrained(
            folder,
            dtype=getattr(torch, config.dtype),
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which are errors below, with their names
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"model.path = {config.path!r} cannot be loaded as {kind}: {error}") from error
    _refuse(config, "of another shape", info["mismatched_keys"])
    return model, {str(name) for name in info["missing_keys"]}


def _refuse(config: ModelConfig, what: str, names: Collection[Any]) -> None:
    if names:
        shown = ", ".join(sorted(str(name) for name in names)[:5])
        raise ModelError(f"model.path = {config.path!r}: {len(names)} parameter(s) {what}: {shown}")


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
