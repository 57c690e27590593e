"""How much memory a run takes, estimated from sizes: for `relax check` and `relax explain`."""

from math import ceil

from relax.config.algorithm import OPDFullConfig
from relax.config.genrm import LocalJudgeConfig
from relax.config.model import ModelConfig
from relax.config.reward import reward_model_of
from relax.config.run import RunConfig
from relax.errors import ModelError
from relax.models.folder import ModelFolder, read_model_folder
from relax.roles.topology import column_makers, in_actor, local_judges, role_specs

# A process that has loaded torch and transformers, one that has not, and Ray's own processes: measured on Linux, CPU build.
_TORCH_PROCESS_BYTES = 400 << 20
_ROLE_PROCESS_BYTES = 250 << 20
_RAY_BYTES = 900 << 20
_SCORING_ROLES = ("reference", "actor_fwd")
_ADAM_BYTES = 8  # two float32 averages a parameter


def memory_bytes(config: RunConfig, model: ModelFolder) -> dict[str, int]:
    """Part of the run -> bytes, at most. Activations are left out: they depend on the architecture."""
    width = 4 if config.model.dtype == "float32" else 2
    weights = model.num_params * width
    rollout = config.rollout
    kv_cache = rollout.engine.max_slots * longest_sample(config, model) * model.kv_numbers_per_token * width
    parts = {
        "actor: weights, gradients, AdamW": 2 * weights + model.num_params * _ADAM_BYTES,
        "actor: logits of one chunk": 3 * 4 * config.train.logprob_chunk * model.vocab_size,
        "engines: weights": rollout.num_engines * weights,
        "engines: key-value cache, all slots full": rollout.num_engines * kv_cache,
        "weight sync: two versions in shared memory": 2 * weights,
        "transfer queue, full": queue_bytes(config, model),
    }
    scoring = [spec.name for spec in role_specs(config) if spec.name in _SCORING_ROLES]
    if scoring:
        parts[f"{' and '.join(scoring)}: weights"] = len(scoring) * weights
    inside = in_actor(config)
    if "reference" in inside:
        parts["actor: copies of weights for the reference"] = 2 * weights
    parts |= _others(config, model)
    others = sum(spec.name in ("teacher", "critic", "reward_model") for spec in role_specs(config))
    heavy = 1 + rollout.num_engines + len(scoring) + others + sum(judge.num_engines for judge in local_judges(config).values())
    if config.run.runtime == "inprocess":
        parts["process"] = _TORCH_PROCESS_BYTES
    else:
        parts["processes and Ray"] = _RAY_BYTES + heavy * _TORCH_PROCESS_BYTES + 2 * _ROLE_PROCESS_BYTES
    parts["reward workers"] = config.reward.num_workers * _ROLE_PROCESS_BYTES
    return parts


def _others(config: RunConfig, policy: ModelFolder) -> dict[str, int]:
    """Critic, teacher and reward model, wherever they run: models of their own."""
    parts, makers = {}, column_makers(config)
    if "critic" in makers:
        num_params, width = _size(config.critic.model or config.model, policy)
        parts["critic: weights, gradients, AdamW"] = num_params * (2 * width + _ADAM_BYTES)
    if "teacher" in makers and config.teacher is not None and config.teacher.model is not None:
        num_params, width = _size(config.teacher.model, policy)
        parts["teacher: weights"] = num_params * width
    if (reward_model := reward_model_of(config.rewards.values())) is not None:
        num_params, width = _size(reward_model.model, policy)
        parts["reward_model: weights"] = num_params * width
    for route, judge in local_judges(config).items():
        parts[f"judge {route}: weights and key-value cache, all slots full"] = judge.num_engines * _judge_bytes(judge)
    return parts


def _judge_bytes(judge: LocalJudgeConfig) -> int:
    """Of one engine; nothing for a folder that cannot be read, which is for `relax check` to say."""
    try:
        folder = read_model_folder(judge.model)
    except ModelError:
        return 0
    width = 4 if judge.model.dtype == "float32" else 2
    context = judge.model.max_context or folder.context
    return width * (folder.num_params + judge.engine.max_slots * context * folder.kv_numbers_per_token)


def _size(model: ModelConfig, policy: ModelFolder) -> tuple[int, int]:
    """Parameters, and bytes of each; the policy's where the folder cannot be read, which is for `relax check` to say."""
    try:
        num_params = read_model_folder(model).num_params
    except ModelError:
        num_params = policy.num_params
    return num_params, 4 if model.dtype == "float32" else 2


def longest_sample(config: RunConfig, model: ModelFolder) -> int:
    """Tokens of the longest sample: what the settings and the model's context allow."""
    context = config.model.max_context or model.context or config.rollout.max_new_tokens
    prompt = config.data.max_prompt_tokens
    return context if prompt is None else min(context, prompt + config.rollout.max_new_tokens)


def queue_bytes(config: RunConfig, model: ModelFolder) -> int:
    """Bytes of the rows that may stand in the queue at once, bounded by `services.queue_max_bytes`."""
    made = len(set(column_makers(config)) - set(in_actor(config)))
    per_token = 4 + 1 + 4 + 4 * made
    if isinstance(config.algorithm, OPDFullConfig) and made:
        per_token += 8 * config.algorithm.top_k
    rows = max_groups_ahead(config) * config.rollout.group_size
    return min(config.services.queue_max_bytes, rows * longest_sample(config, model) * per_token)


def max_groups_ahead(config: RunConfig) -> int:
    """Groups that may be in the works at once: the step in training, those that the bound allows beyond it, and the surplus."""
    rollout = config.rollout
    steps = (rollout.max_staleness + 1) // config.train.updates_per_step
    return steps * rollout.prompts_per_step + ceil((rollout.oversampling - 1) * rollout.prompts_per_step)


def human_bytes(count: float) -> str:
    """12 MB, 3.4 GB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
