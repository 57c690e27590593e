"""What `relax check` can say about judges, without asking one."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from relax.cli.findings import Finding, error, ok, warning
from relax.config import RunConfig
from relax.config.genrm import JudgeConfig, LocalJudgeConfig
from relax.config.reward import GenRMRewardConfig, RewardConfig, leaves
from relax.errors import ModelError
from relax.models.folder import read_model_folder
from relax.roles.topology import judges_in_use


def judge_findings(config: RunConfig) -> Iterator[Finding]:
    """On each judge, and on rewards that wait for one less long than it may take."""
    if config.genrm is None:
        return
    in_use = judges_in_use(config)
    for route, judge in config.genrm.judges.items():
        key = f"genrm.judges.{route}"
        if route not in in_use:
            yield warning(key, f'has no effect: no reward asks it; set reward.type = "genrm" with route = "{route}"')
        else:
            yield from _local(key, judge) if isinstance(judge, LocalJudgeConfig) else _served(key, judge)
    for key, root in config.rewards.items():
        for reward in leaves(root):
            if isinstance(reward, GenRMRewardConfig):
                limit = config.genrm.judges[reward.route].request_time_limit_s
                if root.time_limit_s < limit:
                    yield warning(
                        f"{key}.time_limit_s",
                        f"{root.time_limit_s:g}, and one request may take genrm.judges.{reward.route}.request_time_limit_s = "
                        f"{limit:g}: a slow judge, or one that is restarted, means responses without a reward",
                    )


def shown_findings(config: RunConfig, reward: RewardConfig, names: Mapping[str, str]) -> Iterator[Finding]:
    """What the judges that `reward` asks are shown of rows that have media. `names`: of the media in words, by kind."""
    every = " and ".join(names.values())
    for route, judge in judges_in_use(config, [reward]).items() if names else ():
        key = f"genrm.judges.{route}.media"
        if judge.media is False:
            yield ok(key, f"false: the judge is shown prompts without their {every}")
        elif isinstance(judge, LocalJudgeConfig):
            yield from _shown_to_local(key, judge, names)
        elif judge.media:
            yield ok(key, f"the server is sent the {every} of prompts")
        else:
            hint = "set media = true if the model behind it reads them, or false if it need not"
            yield warning(key, f"the server is shown prompts without their {every}: {hint}")


def _shown_to_local(key: str, judge: LocalJudgeConfig, names: Mapping[str, str]) -> Iterator[Finding]:
    try:
        folder = read_model_folder(judge.model)
    except ModelError:
        return  # which is a finding already
    if unread := " and ".join(name for kind, name in names.items() if kind not in folder.media):
        level = error if judge.media else warning
        what = f"{folder.path} ({folder.model_type}) reads no {unread}, so the judge is shown prompts without them"
        yield level(key, f"{what}: use a model that does, or set media = false if it need not see")
    else:
        yield ok(key, f"the judge is shown the {' and '.join(names.values())} of prompts")


def _local(key: str, judge: LocalJudgeConfig) -> Iterator[Finding]:
    try:
        folder = read_model_folder(judge.model)
    except ModelError as failure:
        yield error(f"{key}.model.path", f"{key}.{failure}" if str(failure).startswith("model.") else str(failure))
        return
    context = judge.model.max_context or folder.context
    if not folder.has_chat_template:
        yield error(f"{key}.model.path", f"the tokenizer of {folder.path} has no chat template, which a judge needs")
    if context and judge.max_new_tokens >= context:
        yield error(
            f"{key}.max_new_tokens",
            f"{judge.max_new_tokens} leaves no room for a question in a context of {context} tokens: use less",
        )
    if judge.engine.device.startswith("cuda") and not Path("/dev/nvidiactl").exists():
        yield error(f"{key}.engine.device", f"{judge.engine.device!r}, and this machine has no NVIDIA device: use auto or cpu")
    yield ok(
        f"{key}.model.path",
        f"{folder.path}: {folder.model_type}, {folder.num_params / 1e6:.2f} M parameters, context {context}",
    )


def _served(key: str, judge: JudgeConfig) -> Iterator[Finding]:
    assert not isinstance(judge, LocalJudgeConfig)
    if judge.api_key_env is not None and not os.environ.get(judge.api_key_env):
        yield error(f"{key}.api_key_env", f"{judge.api_key_env!r}: this environment variable is not set")
    else:
        yield ok(key, f"{judge.model} at {judge.url}, which was not asked")
