"""`relax explain`: what the settings turn into, before anything starts: roles, devices, bounds, memory, the loss in words."""

from collections.abc import Iterator
from pathlib import Path

from relax.algorithms.table import has_advantages, has_critic
from relax.algorithms.words import advantage_in_words, loss_in_words, mean_in_words
from relax.cli.memory import human_bytes, longest_sample, max_groups_ahead, memory_bytes
from relax.config import RunConfig
from relax.config.algorithm import needs_teacher
from relax.config.data import DataConfig
from relax.config.faults import FaultEvent
from relax.config.genrm import LocalJudgeConfig
from relax.config.teacher import TeacherConfig
from relax.control.faults import FaultPlan
from relax.errors import ModelError
from relax.models.folder import ModelFolder, read_model_folder
from relax.roles.topology import (
    RoleSpec,
    devices_of,
    engine_devices,
    engine_names,
    engine_pools,
    in_actor,
    judge_pool,
    judges_in_use,
    role_specs,
    takes_turns,
)

Rows = Iterator[tuple[str, str]]

_ON_STALE = {
    "wait": "never happens: a step waits for the groups that would grow too old",
    "drop": "a group is left out, and its prompt issued again",
    "mask": "its old tokens are left out of the loss; a group with no others is dropped, and its prompt issued again",
}


def explain(config: RunConfig) -> str:
    """The explanation as text, a paragraph for each part. A model folder that cannot be read only leaves its figures out."""
    model: ModelFolder | None = None
    try:
        model = read_model_folder(config.model)
        about_model = (
            f"{model.model_type}, {model.num_params / 1e6:.2f} M parameters, {config.model.dtype}, context {model.context}"
        )
    except ModelError as failure:
        about_model = f"no figures that depend on the model: {failure}"
    folder = Path(config.run.dir) / config.run.name
    parts = [
        _part(f"run {config.run.name}", iter([("folder", str(folder)), ("model", about_model), *_data(config)])),
        _part("roles", _roles(config)),
        _part("one step", _step(config, model)),
        _part("staleness", _staleness(config)),
        _part("learning", _learning(config)),
        _part("evaluation and checkpoints", _evaluation(config)),
    ]
    if faults := FaultPlan(config).left:
        parts.append(_part("faults on purpose", ((f"after step {fault.step}", _fault(fault)) for fault in faults)))
    if model is not None:
        parts.append(_part("memory, at most, activations aside", _memory(config, model)))
    return "\n\n".join(parts)


def _part(title: str, rows: Rows) -> str:
    found = list(rows)
    width = max(len(name) for name, _ in found)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in found)])


def _source(data: DataConfig) -> str:
    match data.type:
        case "file":
            return data.path
        case "reasoning_gym":
            return f"{data.size} problems of reasoning-gym's {data.task}, seed {data.seed}"
        case "generator":
            return f"{data.size} rows of {data.path}, seed {data.seed}"


def _data(config: RunConfig) -> Rows:
    order = (
        f"shuffled by run.seed = {config.run.seed}, another order each epoch" if config.data.shuffle else "in the given order"
    )
    yield "data", f"{_source(config.data)}, {order}"
    if (media := config.data.media) is not None:
        columns = ", ".join(f"{kind}s in {column!r}" for kind, column in media.columns.items())
        workers = f"{media.num_workers} process(es) decode them, up to {media.look_ahead} prompts ahead of need"
        yield "media", f"{columns}; {workers}"
    yield (
        "reward",
        f"{config.reward.type}: {config.reward.num_workers} worker(s), killed after {config.reward.time_limit_s:g} s a call",
    )


def _roles(config: RunConfig) -> Rows:
    engine, specs = config.rollout.engine, role_specs(config)
    where = "tasks of one process, without Ray" if config.run.runtime == "inprocess" else "Ray Serve deployments"
    at = config.run.ray_address
    yield "runtime", where + (f" on the cluster at {at}" if at else "")
    asleep = "; asleep while the actor trains" if takes_turns(config) else ""
    yield "mode", config.resources.mode + (", engines and actor in turns on the same devices" if asleep else "")
    for name in engine_names(config):
        devices = [f"{engine.device}, {engine.num_threads} thread(s)", *_set_aside(config, *engine_devices(config))]
        yield name, f"{engine.type} engine, {engine.max_slots} sequences at once ({', '.join(devices)}){asleep}"
    yield from _judges(config)
    for spec in specs:
        yield spec.name, spec.reason + _devices(config, spec)
    running = {spec.name for spec in specs} | set(in_actor(config))
    if "reference" not in running:
        yield "(reference)", "not started: algorithm.kl.coef = 0"
    if "actor_fwd" not in running:
        yield "(actor_fwd)", f'not started: algorithm.old_logprobs = "{config.algorithm.old_logprobs}"'


def _judges(config: RunConfig) -> Rows:
    """Where judges run: engines by name, servers by route."""
    pools = engine_pools(config)
    for route, judge in judges_in_use(config).items():
        if isinstance(judge, LocalJudgeConfig):
            for name in pools[judge_pool(route)]:
                engine = judge.engine
                devices = [f"{engine.device}, {engine.num_threads} thread(s)", *_set_aside(config, *devices_of(config, name))]
                yield name, f"judge {route}: {judge.model.path} on a {engine.type} engine ({', '.join(devices)})"
        else:
            yield f"(judge {route})", f"{judge.model} at {judge.url}, which this run does not start"


def _devices(config: RunConfig, spec: RoleSpec) -> str:
    words = [f"{config.train.backend.device}, {spec.num_threads} thread(s)"] if spec.name == "actor" else []
    words += _set_aside(config, spec.num_cpus, spec.num_gpus)
    return f" ({', '.join(words)})" if words else ""


def _set_aside(config: RunConfig, num_cpus: float, num_gpus: float) -> list[str]:
    """What Ray sets aside, in words."""
    if config.run.runtime != "ray":
        return []
    return [f"{count:g} {what}" for count, what in ((num_cpus, "CPU"), (num_gpus, "GPU")) if count]


def _step(config: RunConfig, model: ModelFolder | None) -> Rows:
    rollout, train = config.rollout, config.train
    samples = rollout.prompts_per_step * rollout.group_size
    yield "samples", f"{rollout.prompts_per_step} prompts x {rollout.group_size} = {samples}"
    longest = longest_sample(config, model) if model else rollout.max_new_tokens
    generated, computed = samples * rollout.max_new_tokens, samples * longest
    yield "tokens", f"at most {generated:,} generated" + (f", {computed:,} with prompts" if model else "")
    budget = train.max_tokens_per_micro_batch
    if config.data.media is not None:
        yield "micro-batches", f"of {budget} tokens, those included that encoding media costs as much as"
    elif model:
        yield (
            "micro-batches",
            f"at most {max(1, -(-computed // budget))} of {budget} tokens when all samples have the longest length",
        )
    else:
        yield "micro-batches", f"of {budget} tokens"
    yield "whole run", f"{train.num_steps} steps, {train.num_steps * samples:,} samples"


def _staleness(config: RunConfig) -> Rows:
    rollout, train = config.rollout, config.train
    ahead = max_groups_ahead(config)
    if rollout.max_staleness == 0:
        yield "bound", "0: every sample is generated by exactly the policy that it trains; generation and training take turns"
    else:
        yield (
            "bound",
            f"a sample is trained at most {rollout.max_staleness} optimizer update(s) after its oldest token was generated",
        )
    yield "running ahead", f"at most {ahead} groups ({ahead * rollout.group_size} samples) are begun and not yet trained"
    if train.updates_per_step > 1:
        yield "updates", f"{train.updates_per_step} on each step's groups; all but the first add to the age of the samples"
    if train.publish_every > 1:
        yield "publication", f"after every {train.publish_every} steps; the steps between add to the age of the samples"
    yield "too old", _ON_STALE[rollout.on_stale]
    if rollout.mask_older_versions:
        yield "mixed samples", "of a response that several policies wrote, only the newest one's tokens are trained"
    if rollout.filter_zero_signal:
        yield "filter", "groups whose rewards are all equal are left out; another prompt takes their place"
    if rollout.oversampling > 1:
        yield "surplus", f"{rollout.oversampling:g} times the groups of a step are begun, in case some are left out"


def _learning(config: RunConfig) -> Rows:
    train, algorithm = config.train, config.algorithm
    if has_advantages(algorithm):
        yield "advantage", advantage_in_words(algorithm)
    yield "loss", loss_in_words(algorithm)
    if algorithm.kl.coef and algorithm.kl.place == "loss":
        every = algorithm.kl.update_reference_every
        to = f"the policy of the last multiple of {every} steps" if every else "the weights at the start of the run"
        yield "KL", f"+ {algorithm.kl.coef:g} x {algorithm.kl.kind} to {to}, in the loss"
    if algorithm.entropy_coef:
        yield "entropy", f"- {algorithm.entropy_coef:g} x entropy"
    yield "mean", mean_in_words(algorithm, config.rollout.max_new_tokens)
    yield "learning rate", _schedule(config)
    if has_critic(algorithm):
        yield "critic", _critic(config)
    if config.teacher is not None and needs_teacher(algorithm):
        yield "teacher", _teacher(config.teacher)
    yield (
        "optimizer",
        f"AdamW, betas {train.betas[0]:g} and {train.betas[1]:g}, weight decay {train.weight_decay:g}, "
        + (f"gradient norm cut at {train.grad_clip:g}"),
    )


def _teacher(teacher: TeacherConfig) -> str:
    if teacher.model is not None:
        return teacher.model.path
    server = teacher.server
    assert server is not None
    return (
        f"{server.url} ({server.protocol}), {server.max_requests} requests at once; a sample without an answer in "
        f"{server.time_limit_s:g} s is left out, {server.max_failed_in_a_row} of them in a row end the run"
    )


def _schedule(config: RunConfig, lr: float | None = None) -> str:
    """Of the policy's learning rate, or of another peak `lr`."""
    train, peak = config.train, lr or config.train.lr
    warmup = f"0 to {peak:g} over {train.warmup_steps} step(s), then " if train.warmup_steps else ""
    if train.schedule == "constant":
        return f"{warmup}{peak:g}, constant"
    return f"{warmup}{peak:g} down to {peak * train.min_lr_ratio:g} at step {train.num_steps}, {train.schedule}"


def _critic(config: RunConfig) -> str:
    critic = config.critic
    alone = f"; learns alone for {critic.warmup_steps} step(s), the policy waits" if critic.warmup_steps else ""
    return f"{(critic.model or config.model).path}, learning rate {_schedule(config, critic.lr)}{alone}"


def _evaluation(config: RunConfig) -> Rows:
    plan, last = config.eval, config.train.num_steps
    if plan is None:
        yield "evaluation", "none: the run file has no [eval]"
    else:
        steps = [0, *(range(plan.every, last, plan.every) if plan.every else ()), last]
        shown = ", ".join(map(str, steps)) if len(steps) <= 8 else f"{', '.join(map(str, steps[:3]))}, ... {steps[-2]}, {last}"
        yield "evaluation", f"at steps {shown}, beside training; a step that is overtaken meanwhile is skipped"
        how = "the most likely tokens" if plan.temperature == 0 else f"sampled at temperature {plan.temperature:g}"
        yield "", f"{plan.num_prompts} prompts x {plan.samples_per_prompt} from {_source(plan.data)}; {how}"
    every, keep = config.train.checkpoint.every, config.train.checkpoint.keep
    when = f"every {every} step(s) and at the end" if every else "at the end only"
    yield "checkpoints", f"{when}; the last {keep} stay; the model of the last step is exported to hf/"


def _fault(fault: FaultEvent) -> str:
    chance = f", each with a chance of {fault.probability:g}" if fault.probability < 1 else ""
    match fault.kind:
        case "kill":
            return f"{fault.target} is killed"
        case "delay":
            return f"{fault.target}: {fault.count} call(s) of the queue take {fault.seconds:g} s longer{chance}"
        case "lose_messages":
            return f"{fault.target}: {fault.count} message(s) to or from the queue are lost{chance}"
        case "fail_sync":
            return f"{fault.target} refuses {fault.count} publication(s) of weights{chance}"


def _memory(config: RunConfig, model: ModelFolder) -> Rows:
    parts = memory_bytes(config, model)
    for name, count in parts.items():
        yield name, human_bytes(count)
    yield "together", human_bytes(sum(parts.values()))
