"""`[train]`: optimizer, micro-batches, back end, checkpoints."""

from typing import Annotated, Literal

from pydantic import Field

from relax.config.base import Section


class TorchBackendConfig(Section):
    """A transformers model trained with torch on one device."""

    type: Literal["torch"] = "torch"
    """Name of the back end."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a CUDA device if there is one."""
    num_threads: int = Field(1, ge=1)
    """Threads of torch in the trainer's process. On few cores one thread a process is faster than two."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    use_fused_forward: bool = True
    """Run Llama- and Qwen-like dense decoders through relax's fused forward; others always use transformers' own."""


BackendConfig = Annotated[TorchBackendConfig, Field()]


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many stay."""

    every: int = Field(0, ge=0)
    """Save a checkpoint every so many steps; 0 saves at the end only."""
    keep: int = Field(2, ge=1)
    """How many checkpoints stay. The last good one is never deleted before a newer one is complete."""


class TrainConfig(Section):
    """Optimizer, micro-batches, back end, checkpoints."""

    num_steps: int = Field(ge=1)
    """Number of steps of the run; each consumes `rollout.prompts_per_step` groups."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates on each step's groups, one pass over them each. Every update counts in the age of the samples."""
    publish_every: int = Field(1, ge=1)
    """Publish the weights to the engines after every so many steps; the steps between count in the age of the samples."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, down to `min_lr_ratio` at `num_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Last learning rate over the peak one, for `linear` and `cosine`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging coefficients."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's term for numerical stability."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay, on matrices only."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global norm of the gradient."""
    freeze: list[str] = []
    """Weights of policy and critic that stay as they are, by patterns of names at any depth: `"visual.*"`, `"audio_tower.*"`,
    `"layers.0.*"`."""
    max_tokens_per_micro_batch: int = Field(8192, ge=1)
    """Budget of one forward and backward pass: tokens, and on top of them the work of encoding media, in tokens. A longer
    sample makes a micro-batch of its own, and media never divide a group. On a CPU at most 2,048."""
    logprob_chunk: int = Field(2048, ge=1)
    """Rows of the vocabulary projection held at once: bounds the memory of logits to chunk x vocabulary."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and how many are kept."""
    backend: BackendConfig = TorchBackendConfig()
    """The training back end."""
