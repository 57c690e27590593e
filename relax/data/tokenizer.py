"""Loading a tokenizer from a model folder, without a network."""

import json
from pathlib import Path
from typing import Any

from relax.config.model import ModelConfig
from relax.data.transcripts import transcript_template
from relax.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(model: ModelConfig) -> Any:
    """The transformers tokenizer in `model.tokenizer_path`, or else in `model.path`.

    Raises `ModelError` for a folder that is missing, holds no tokenizer, or one that cannot be read.
    """
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    folder = Path(model.tokenizer_path or model.path)
    if not folder.is_dir():
        what = "is a file, and a folder is needed" if folder.exists() else "no such folder"
        raise ModelError(f"{key} = {str(folder)!r}: {what}; models are read from local folders and never downloaded")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{key} = {str(folder)!r}: the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy its "
            "files into it, or name their folder in model.tokenizer_path"
        )
    from transformers import AutoTokenizer  # heavy: takes a second, and torch with it where torch is installed

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=model.trust_remote_code)
        template = folder / "chat_template.json"  # of a processor, which may have it in place of the tokenizer
        if template.is_file() and hasattr(tokenizer, "decode") and not tokenizer.chat_template:
            tokenizer.chat_template = json.loads(template.read_text("utf-8"))["chat_template"]
        if hasattr(tokenizer, "decode") and not tokenizer.chat_template:
            tokenizer.chat_template = transcript_template(folder)
    except Exception as error:  # transformers raises many kinds for a folder that it cannot read
        raise ModelError(f"{key} = {str(folder)!r}: the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    if not hasattr(tokenizer, "decode") or len(tokenizer) == 0:
        raise ModelError(f"{key} = {str(folder)!r}: the tokenizer has no tokens")
    return tokenizer
