"""Settings that are allowed and yet do nothing, or not what was meant."""

from collections.abc import Iterator
from pathlib import Path

from relax.cli.findings import Finding, error, ok, warning
from relax.config import RunConfig
from relax.config.algorithm import CustomConfig
from relax.control.faults import FaultPlan
from relax.data.dotted import load_function
from relax.errors import ConfigError
from relax.roles.topology import takes_turns


def setting_findings(config: RunConfig) -> Iterator[Finding]:
    """Findings about the settings alone, whatever model and data."""
    train, algorithm, rollout = config.train, config.algorithm, config.rollout
    yield ok(
        "settings",
        f"{algorithm.type}, {rollout.prompts_per_step} x {rollout.group_size} samples a step, {train.num_steps} steps",
    )
    if train.warmup_steps >= train.num_steps:
        yield warning(
            "train.warmup_steps", f"{train.warmup_steps} of {train.num_steps} steps: the peak train.lr is never reached"
        )
    if train.schedule == "constant" and train.min_lr_ratio:
        yield warning("train.min_lr_ratio", 'has no effect with train.schedule = "constant"')
    if not algorithm.kl.coef:
        for name in ("kind", "place", "update_reference_every"):
            if name in algorithm.kl.model_fields_set:
                yield warning(f"algorithm.kl.{name}", "has no effect with algorithm.kl.coef = 0")
    if isinstance(algorithm, CustomConfig):
        yield from _functions(algorithm)
    yield from _staleness(config)
    yield from _faults(config)
    if config.run.runtime == "inprocess" and config.run.ray_address is not None:
        yield warning("run.ray_address", 'has no effect with run.runtime = "inprocess"')
    if config.eval and config.eval.samples_per_prompt > 1 and config.eval.temperature == 0:
        yield warning(
            "eval.samples_per_prompt", "all samples of a prompt are the same at eval.temperature = 0: set it above 0, or use 1"
        )
    for key, device in (("rollout.engine.device", rollout.engine.device), ("train.backend.device", train.backend.device)):
        if device.startswith("cuda") and not Path("/dev/nvidiactl").exists():
            yield error(key, f"{device!r}, and this machine has no NVIDIA device: use auto or cpu")


def _functions(algorithm: CustomConfig) -> Iterator[Finding]:
    """Whether what is the user's can be loaded."""
    named = {"algorithm.path": algorithm.path}
    if ":" in algorithm.objective:
        named["algorithm.objective"] = algorithm.objective
    for key, path in named.items():
        try:
            load_function(path, key)
        except ConfigError as mistake:
            yield error(key, str(mistake).removeprefix(f"{key} = "))


def _faults(config: RunConfig) -> Iterator[Finding]:
    try:
        FaultPlan(config)
    except ConfigError as mistake:
        yield error("faults.events", str(mistake).removeprefix("faults.events: "))
    if config.faults.random_kills and config.train.num_steps < 2:
        yield warning("faults.random_kills", "has no effect with train.num_steps = 1: there is no step after the first")


def _staleness(config: RunConfig) -> Iterator[Finding]:
    rollout, resources, algorithm = config.rollout, config.resources, config.algorithm
    is_bare = algorithm.correction.type == "none" and not algorithm.learns_from_any_policy
    if rollout.max_staleness > 0 and algorithm.old_logprobs == "recompute" and is_bare:
        yield warning(
            "algorithm.correction",
            "none: the ratio to recomputed log-probs does not see the age of stale samples; set algorithm.correction.type = "
            '"decoupled", or algorithm.old_logprobs = "rollout"',
        )
    if rollout.max_staleness == 0:
        if rollout.on_stale != "wait":
            yield warning("rollout.on_stale", "has no effect with rollout.max_staleness = 0: nothing can grow too old")
        if rollout.mask_older_versions:
            yield warning("rollout.mask_older_versions", "has no effect with rollout.max_staleness = 0: no sample is mixed")
    if rollout.oversampling > 1 and not rollout.filter_zero_signal:
        yield warning(
            "rollout.oversampling",
            f"{rollout.oversampling:g}, and nothing is filtered: set rollout.filter_zero_signal = true, or use 1.0",
        )
    if rollout.oversampling > 1 and rollout.max_staleness == 0:
        yield warning(
            "rollout.oversampling",
            "surplus cannot be kept with rollout.max_staleness = 0: it is generated twice; use a bound of 1 or more",
        )
    if takes_turns(config):
        for name in ("engine_cpus", "engine_gpus"):
            if name in resources.model_fields_set:
                yield warning(
                    f"resources.{name}", f'has no effect with resources.mode = "{resources.mode}": engines share the actor\'s'
                )
