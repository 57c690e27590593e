"""Which roles a run needs, where they run and what each of them reads: the only place that knows the modes.

| mode | forwards and advantages | engines while the actor trains |
|---|---|---|
| `colocate` | inside the actor | asleep: the devices are shared, in turns |
| `hybrid` | inside the actor | generating |
| `fully_async` | roles of their own, streaming | generating |
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from relax.algorithms.table import has_advantages, is_whole_batch, made_columns, needed_columns
from relax.config.algorithm import AlgorithmConfig, CustomConfig
from relax.config.genrm import JudgeConfig, LocalJudgeConfig
from relax.config.reward import FunctionRewardConfig, GenRMRewardConfig, RewardConfig, leaves, reward_model_of
from relax.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Mode:
    """What a mode means. `has_services`: columns come from roles of their own, else the actor computes them;
    `takes_turns`: engines and actor share their devices, one at a time."""

    has_services: bool
    takes_turns: bool


MODES = {
    "colocate": Mode(has_services=False, takes_turns=True),
    "hybrid": Mode(has_services=False, takes_turns=False),
    "fully_async": Mode(has_services=True, takes_turns=False),
}

POLICY = "policy"
"""Name of the engines that generate with the policy."""

_NUM_PARTS = 4  # a step's groups reach the actor in about so many parts


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A role of a run: its name, why it is started, and what Ray sets aside for it. `answers`: others send it requests."""

    name: str
    reason: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    num_threads: int = 1
    answers: bool = False


@dataclass(frozen=True, slots=True)
class Claims:
    """How the actor takes a step's groups: `at_least` to `at_most` at a time; it trains on `part` of them at once."""

    at_least: int
    at_most: int
    part: int


def mode_of(config: RunConfig) -> Mode:
    """What `resources.mode` means."""
    return MODES[config.resources.mode]


def column_makers(config: RunConfig) -> dict[str, str]:
    """Who computes columns between rollout and actor, and why: role name -> reason. Each may need columns of those before it;
    useless ones are left out."""
    algorithm = config.algorithm
    needed, kind = needed_columns(algorithm), f'algorithm.type = "{algorithm.type}"'
    makers = {}
    if "ref_logprobs" in needed:
        why = f"algorithm.kl.coef = {algorithm.kl.coef}" if algorithm.kl.coef else _names("ref_logprobs")
        makers["reference"] = f"{why} needs reference log-probs"
    if "old_logprobs" in needed:
        recompute = algorithm.old_logprobs == "recompute"
        why = 'algorithm.old_logprobs = "recompute"' if recompute else _names("old_logprobs")
        makers["actor_fwd"] = f"{why} needs the proximal policy"
    if teacher_columns(algorithm):
        makers["teacher"] = f"{kind} asks a teacher how likely it finds the samples"
    if "values" in needed:
        makers["critic"] = f"{kind} needs values; learns them"
    if has_advantages(algorithm):
        makers["advantages"] = f"turns rewards into advantages ({algorithm.type})"
    return makers


def _names(column: str) -> str:
    return f'algorithm.needs with "{column}"'


def teacher_columns(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """What a teacher has to say about the samples, if there is one."""
    return tuple(name for name in needed_columns(algorithm) if name.startswith("teacher_"))


def _columns_of(config: RunConfig, maker: str) -> tuple[str, ...]:
    match maker:
        case "reference":
            return ("ref_logprobs",)
        case "actor_fwd":
            return ("old_logprobs",)
        case "teacher":
            return teacher_columns(config.algorithm)
        case "critic":
            return ("values",)
    return made_columns(config.algorithm)


def role_specs(config: RunConfig) -> tuple[RoleSpec, ...]:
    """The roles that this configuration has a use for, in the order in which they start."""
    resources, mode = config.resources, mode_of(config)
    inside = in_actor(config)
    also = f"; computes {', '.join(inside)} itself" if inside else ""
    gpus = {"reference": resources.reference_gpus, "actor_fwd": resources.reference_gpus}
    gpus |= {"teacher": resources.teacher_gpus, "critic": resources.critic_gpus}
    specs = []
    if judges := judges_in_use(config):
        specs.append(RoleSpec("genrm", f"asks judges what responses are worth ({', '.join(judges)})", answers=True))
    if (reward_model := reward_model_of(config.rewards.values())) is not None:
        reason, threads = f"scores responses with {reward_model.model.path}", reward_model.num_threads
        specs.append(RoleSpec("reward_model", reason, 0.0, resources.reward_model_gpus, threads, answers=True))
    specs.append(RoleSpec("rollout", "generates groups, scores them and puts them into the transfer queue"))
    for name, reason in column_makers(config).items():
        if name not in inside:
            specs.append(RoleSpec(name, reason, 0.0, gpus.get(name, 0.0)))
    share = 0.5 if mode.takes_turns else 1.0
    specs.append(
        RoleSpec(
            "actor",
            "trains the policy and publishes its weights" + also,
            share * resources.actor_cpus,
            share * resources.actor_gpus,
            config.train.backend.num_threads,
        )
    )
    return tuple(specs)


def judges_in_use(config: RunConfig, rewards: Iterable[RewardConfig] | None = None) -> dict[str, JudgeConfig]:
    """The judges that `rewards` ask, by default all of the run's, by route; a function may ask any of them."""
    if config.genrm is None:
        return {}
    asking = [reward for root in (config.rewards.values() if rewards is None else rewards) for reward in leaves(root)]
    if any(isinstance(reward, FunctionRewardConfig) for reward in asking):
        return dict(config.genrm.judges)
    routes = {reward.route for reward in asking if isinstance(reward, GenRMRewardConfig)}
    return {route: judge for route, judge in config.genrm.judges.items() if route in routes}


def answering_roles(config: RunConfig) -> tuple[str, ...]:
    """The roles that others send requests to."""
    return tuple(spec.name for spec in role_specs(config) if spec.answers)


def in_actor(config: RunConfig) -> tuple[str, ...]:
    """The column makers that run inside the actor: all of them without services, else those that need a whole step at once."""
    makers = tuple(column_makers(config))
    if not mode_of(config).has_services:
        return makers
    if not is_whole_batch(config.algorithm):
        return ()
    # what gae makes for the critic is the same whatever else is in the step; nobody knows that of a function of the user's
    whole = ("critic", "advantages") if isinstance(config.algorithm, CustomConfig) else ("advantages",)
    return tuple(name for name in makers if name in whole)


def engine_names(config: RunConfig) -> tuple[str, ...]:
    """Names of the generation engines."""
    return tuple(f"engine-{index}" for index in range(config.rollout.num_engines))


def local_judges(config: RunConfig) -> dict[str, LocalJudgeConfig]:
    """Judges with engines of this run, by route."""
    return {route: judge for route, judge in judges_in_use(config).items() if isinstance(judge, LocalJudgeConfig)}


def judge_pool(route: str) -> str:
    """Name of the engines of the judge at `route`."""
    return f"judge-{route}"


def engine_pools(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """All engines of a run, by what they generate with: the policy, or a judge."""
    judges = {
        judge_pool(route): tuple(f"{judge_pool(route)}-{index}" for index in range(judge.num_engines))
        for route, judge in local_judges(config).items()
    }
    return {POLICY: engine_names(config), **judges}


def judge_of(config: RunConfig, engine: str) -> LocalJudgeConfig | None:
    """The judge that the engine of this name generates with; none for those of the policy."""
    pools, judges = engine_pools(config), local_judges(config)
    return next((judge for route, judge in judges.items() if engine in pools[judge_pool(route)]), None)


def engine_devices(config: RunConfig) -> tuple[float, float]:
    """CPUs and GPUs that Ray sets aside for each engine: where it takes turns, its part of the actor's own."""
    resources = config.resources
    if mode_of(config).takes_turns:
        share = 0.5 / config.rollout.num_engines
        return share * resources.actor_cpus, share * resources.actor_gpus
    return resources.engine_cpus, resources.engine_gpus


def devices_of(config: RunConfig, engine: str) -> tuple[float, float]:
    """CPUs and GPUs that Ray sets aside for the engine of this name; a judge's has its own, in every mode."""
    if judge_of(config, engine) is not None:
        return config.resources.genrm_cpus, config.resources.genrm_gpus
    return engine_devices(config)


def takes_turns(config: RunConfig) -> bool:
    """Whether engines give their weights up while the actor trains."""
    return mode_of(config).takes_turns


def actor_columns(config: RunConfig) -> tuple[str, ...]:
    """The columns that a row needs before the actor may take it."""
    columns = ["tokens", "loss_mask", "rollout_logprobs", "versions", "segments", "num_sampled", "reward", "outcome"]
    inside = in_actor(config)
    for name in column_makers(config):
        if name not in inside:
            columns += _columns_of(config, name)
    return tuple(columns)


def actor_claims(config: RunConfig) -> Claims:
    """A whole step at once where the actor waits for its turn, or advantages for all rows. Parts of fixed size where sums must
    not depend on timing. Else whatever is ready, but not single groups, whose micro-batches would be small and slow."""
    size = config.rollout.prompts_per_step
    part = ceil(size / _NUM_PARTS)
    if mode_of(config).takes_turns or is_whole_batch(config.algorithm):
        return Claims(size, size, part)
    if config.run.deterministic:
        return Claims(part, part, part)
    return Claims(min(4, part), size, size)
