"""What `relax check` can say about the models beside the policy: the critic's, the teacher's and the reward model's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax.algorithms.table import has_critic
from relax.cli.findings import Finding, error, ok, warning
from relax.cli.memory import longest_sample
from relax.config import RunConfig
from relax.config.algorithm import OPDFullConfig, needs_teacher
from relax.config.model import ModelConfig
from relax.config.reward import RewardModelRewardConfig, reward_model_of
from relax.errors import ConfigError, ModelError
from relax.models.folder import ModelFolder, read_model_folder


def other_model_findings(config: RunConfig, policy: ModelFolder | None, *, ask_teacher: bool = False) -> Iterator[Finding]:
    """On critic and teacher, where the algorithm has them, on settings of those that it has not, and on the reward model.
    `ask_teacher`: the server of a teacher is asked about a few tokens; else nothing is connected to."""
    algorithm, critic, teacher = config.algorithm, config.critic, config.teacher
    if not has_critic(algorithm):
        for name in sorted(critic.model_fields_set):
            yield warning(f"critic.{name}", f'has no effect with algorithm.type = "{algorithm.type}", which has no critic')
    elif critic.warmup_steps >= config.train.num_steps:
        yield warning(
            "critic.warmup_steps", f"{critic.warmup_steps} of {config.train.num_steps} steps: the policy never learns"
        )
    if has_critic(algorithm) and critic.model is not None:
        yield from _model(config, "critic.model.path", critic.model, policy)
    if teacher is not None and needs_teacher(algorithm):
        if teacher.model is not None:
            yield from _model(config, "teacher.model.path", teacher.model, policy)
        elif policy is not None:
            yield _server(config, ask_teacher=ask_teacher)
    elif teacher is not None:
        yield warning("teacher", f'has no effect with algorithm.type = "{algorithm.type}", which has no teacher')
    if (reward_model := reward_model_of(config.rewards.values())) is not None:
        yield from _reward_model(config, reward_model, policy)


def _reward_model(config: RunConfig, reward: RewardModelRewardConfig, policy: ModelFolder | None) -> Iterator[Finding]:
    key = "reward.model.path"
    try:
        folder = read_model_folder(reward.model)
    except ModelError as failure:
        yield error(key, f"{key}{str(failure).removeprefix('model.path')}")
        return
    described = json.loads((folder.path / "config.json").read_text("utf-8"))
    kind, num_labels = str((described.get("architectures") or ["unknown"])[0]), len(described.get("id2label") or (0, 1))
    if not kind.endswith("ForSequenceClassification"):
        yield error(key, f'{folder.path} is a {kind}; relax sft with task.type = "reward_model" makes a classifier of it')
    elif reward.label >= num_labels:
        yield error("reward.label", f"{reward.label}, and {folder.path} has {num_labels} label(s), counted from 0")
    elif config.data.chat_template and not folder.has_chat_template:
        yield error(key, f"the tokenizer of {folder.path} has no chat template, and the prompts are chat messages")
    else:
        yield ok(key, f"{folder.path}: {kind}, {folder.num_params / 1e6:.2f} M parameters, context {folder.context}")
    context = reward.model.max_context or folder.context
    if policy is not None and context and longest_sample(config, policy) > context:
        yield warning(
            key,
            f"a sample may have {longest_sample(config, policy)} tokens, and the context of {folder.path} has {context}: those "
            "that are longer have no reward",
        )


def _server(config: RunConfig, *, ask_teacher: bool) -> Finding:
    assert config.teacher is not None
    assert config.teacher.server is not None
    url = config.teacher.server.url
    if not ask_teacher:
        return ok("teacher.server.url", f"{url} is asked when the run starts; relax check --ask-teacher asks it now")
    # here, since it brings the client of a server along, which hardly any check needs
    from relax.roles.served_teacher import ServedTeacher

    try:
        ServedTeacher(config).load()
    except ConfigError as failure:
        return error("teacher.server", str(failure))
    return ok("teacher.server.url", f"{url} tells log-probs of the policy's tokens, each in its place")


def _model(config: RunConfig, key: str, model: ModelConfig, policy: ModelFolder | None) -> Iterator[Finding]:
    try:
        folder = read_model_folder(model)
    except ModelError as failure:
        yield error(key, f"{key}{str(failure).removeprefix('model.path')}")
        return
    yield ok(key, f"{folder.path}: {folder.model_type}, {folder.num_params / 1e6:.2f} M parameters, context {folder.context}")
    if policy is None:
        return
    if config.data.media is not None and policy.media and not folder.media:
        yield error(
            key, f"{folder.path} ({folder.model_type}) reads text, and the rows have media: use one of the policy's family"
        )
    longest = longest_sample(config, policy)
    if folder.context and longest > folder.context:
        yield error(key, f"a sample may have {longest} tokens, and the context of {folder.path} has {folder.context}")
    if (differs := _first_difference(policy.tokenizer_path, folder.tokenizer_path)) is not None:
        number, theirs, ours = differs
        yield error(
            key,
            f"its tokenizer is not the policy's: token {number} is {theirs!r} there and {ours!r} here. It reads the "
            "policy's tokens as they are: use a model of the same family",
        )
    top_k = config.algorithm.top_k if isinstance(config.algorithm, OPDFullConfig) else 0
    if 0 < min(policy.vocab_size, folder.vocab_size) < top_k:
        fewest = min(policy.vocab_size, folder.vocab_size)
        yield error("algorithm.top_k", f"{top_k}, and policy and teacher share {fewest} tokens: use at most so many")


def _first_difference(ours: Path, theirs: Path) -> tuple[int, str, str] | None:
    """(number, their token, our token) of the first number that both use for different tokens."""
    mine, other = _tokens(ours), _tokens(theirs)
    return next(((n, other[n], mine[n]) for n in sorted(mine.keys() & other.keys()) if mine[n] != other[n]), None)


def _tokens(folder: Path) -> dict[int, str]:
    """Tokens by number; none where the folder describes them in another way than `tokenizer.json`."""
    try:
        described: Any = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        vocabulary = described["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], n) for n, entry in enumerate(vocabulary))
        added = {int(token["id"]): str(token["content"]) for token in described.get("added_tokens", [])}
        return {int(number): str(token) for token, number in pairs} | added
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}  # what is wrong with it is for whoever loads it to say
