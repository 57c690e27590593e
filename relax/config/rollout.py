"""`[rollout]`: how samples are generated, and how far generation may run ahead of training."""

from typing import Annotated, Literal

from pydantic import Field

from relax.config.base import Section


class LocalEngineConfig(Section):
    """The embedded engine: continuous batching on any transformers causal language model, on a CPU or one CUDA device."""

    type: Literal["local"] = "local"
    """Name of the engine."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a CUDA device if there is one."""
    num_threads: int = Field(1, ge=1)
    """Threads of torch in the engine's process."""
    max_slots: int = Field(256, ge=1)
    """Sequences that are decoded together."""
    max_prefill_tokens: int = Field(4096, ge=1)
    """Prompt tokens computed in one pass."""
    use_fused_forward: bool = True
    """Run Llama- and Qwen-like dense decoders through relax's fused forward; others always use transformers' own."""


EngineConfig = Annotated[LocalEngineConfig, Field()]


class RolloutConfig(Section):
    """How samples are generated, and how far generation may run ahead of training."""

    group_size: int = Field(8, ge=1)
    """Samples of each prompt."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts (groups) that one optimizer step consumes."""
    max_staleness: int = Field(1, ge=0)
    """Largest age of a sample when it is trained, in optimizer steps: 0 is strictly on-policy."""
    on_stale: Literal["wait", "drop", "mask"] = "wait"
    """What happens to a group that would grow older than `max_staleness`. `wait`: the step waits for it. `drop`: it is left
    out, and its prompt is issued again. `mask`: only its tokens that are too old are left out of the loss."""
    oversampling: float = Field(1.0, ge=1.0, le=4.0)
    """Groups begun for each step over those it needs, so that filtered ones need not be waited for; surplus is kept for the
    next step within `max_staleness`, other surplus is issued again. 1.0: none."""
    max_new_tokens: int = Field(1024, ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the trainer's log-probs use the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; only 1.0 (off) can be trained on."""
    top_k: int = Field(0, ge=0)
    """Top-k sampling; only 0 (off) can be trained on."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    mask_older_versions: bool = False
    """In a response that was generated over several policy versions, train the newest version's tokens alone."""
    filter_zero_signal: bool = False
    """Leave out groups whose raw rewards are all equal; their place is given to another prompt."""
    max_filtered_in_a_row: int = Field(1000, ge=1)
    """Stop with an error after so many groups without signal, one after another."""
    max_failed_in_a_row: int = Field(20, ge=1)
    """Stop with the first error after so many failed groups, one after another."""
    num_engines: int = Field(1, ge=1)
    """How many engines generate."""
    engine: EngineConfig = LocalEngineConfig()
    """The generation engine."""
