"""Which roles a run needs and what each of them reads: the only place that knows the modes."""

from dataclasses import dataclass

from relax.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A role of a run: its name, why it is started, and what Ray sets aside for it."""

    name: str
    reason: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    num_threads: int = 1


def role_specs(config: RunConfig) -> tuple[RoleSpec, ...]:
    """The roles that this configuration has a use for, in the order in which they start."""
    resources, algorithm = config.resources, config.algorithm
    specs = [
        RoleSpec("rollout", "generates groups, scores them and puts them into the transfer queue"),
        RoleSpec("advantages", f"turns rewards into advantages ({algorithm.type})"),
        RoleSpec(
            "actor",
            "trains the policy and publishes its weights",
            resources.actor_cpus,
            resources.actor_gpus,
            config.train.backend.num_threads,
        ),
    ]
    if algorithm.kl.coef > 0:
        specs.append(
            RoleSpec(
                "reference", f"algorithm.kl.coef = {algorithm.kl.coef} needs reference log-probs", 0.0, resources.reference_gpus
            )
        )
    if algorithm.old_logprobs == "recompute":
        specs.append(
            RoleSpec(
                "actor_fwd", 'algorithm.old_logprobs = "recompute" needs the proximal policy', 0.0, resources.reference_gpus
            )
        )
    return tuple(specs)


def engine_names(config: RunConfig) -> tuple[str, ...]:
    """Names of the generation engines."""
    return tuple(f"engine-{index}" for index in range(config.rollout.num_engines))


def actor_columns(config: RunConfig) -> tuple[str, ...]:
    """The columns that a row needs before the actor may train on it."""
    columns = ["tokens", "loss_mask", "rollout_logprobs", "advantages", "versions", "reward", "outcome"]
    if config.algorithm.kl.coef > 0:
        columns.append("ref_logprobs")
    if config.algorithm.old_logprobs == "recompute":
        columns.append("old_logprobs")
    return tuple(columns)
