"""`[model]`: which weights are trained."""

from typing import Literal

from relax.config.base import Section


class ModelConfig(Section):
    """Which weights are trained."""

    path: str
    """Folder with a Hugging Face model: `config.json`, safetensors and the tokenizer."""
    tokenizer_path: str | None = None
    """Folder with the tokenizer, when it is not `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the policy's weights in the trainer and in the embedded engine."""
    max_context: int | None = None
    """Longest prompt plus response, in tokens. Default: what the model's config says."""
    trust_remote_code: bool = False
    """Let the model folder bring its own Python code. Off, since that code runs with your rights."""
