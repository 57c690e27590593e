"""`[resources]`: which roles share devices."""

from typing import Literal

from pydantic import Field

from relax.config.base import Section


class ResourcesConfig(Section):
    """Which roles share devices."""

    mode: Literal["colocate", "hybrid", "fully_async"] = "fully_async"
    """`fully_async`: every role on its own, streaming through the transfer queue. `hybrid`: engines beside the actor, which
    does the work of reference, actor_fwd, teacher, critic and advantages itself. `colocate`: as `hybrid`, but engines and actor
    take turns on the same devices; needs `rollout.max_staleness = 0`."""
    actor_cpus: float = Field(1.0, gt=0)
    """CPUs that Ray sets aside for the actor."""
    actor_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray sets aside for the actor."""
    engine_cpus: float = Field(1.0, gt=0)
    """CPUs that Ray sets aside for each engine."""
    engine_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray sets aside for each engine."""
    reference_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray sets aside for the reference and actor_fwd roles, each."""
    teacher_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray sets aside for the teacher role."""
    critic_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray sets aside for the critic role."""
    genrm_cpus: float = Field(1.0, gt=0)
    """CPUs that Ray sets aside for each engine of a local judge."""
    genrm_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray sets aside for each engine of a local judge, in every mode."""
    reward_model_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray sets aside for the reward_model role."""
