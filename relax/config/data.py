"""`[data]` and `[eval]`: where prompts come from."""

from typing import Annotated, Any, Literal

from pydantic import Field

from relax.config.base import Section
from relax.config.media import MediaConfig
from relax.config.reward import RewardConfig


class DataSection(Section):
    """Settings that every source of prompts shares."""

    shuffle: bool = True
    """Give the rows in an order that `run.seed` fixes, another one each epoch."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A malformed row stops the run with its file and line, or is left out and counted."""
    system_prompt: str | None = None
    """Put before every conversation that has no system message."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false: the prompt's text as it is."""
    template_options: dict[str, Any] = {}
    """Passed to the chat template, for example `enable_thinking = false`."""
    max_prompt_tokens: int | None = None
    """Rows with longer prompts are bad rows. Default: the model's context less `rollout.max_new_tokens`."""
    media: MediaConfig | None = None
    """Images, audio clips and videos of the rows, for models that see and hear. Default: rows are of text."""


class FileDataConfig(DataSection):
    """jsonl or parquet files, a json file that is one list, or a folder saved by Hugging Face `datasets`."""

    type: Literal["file"] = "file"
    """Name of the source."""
    path: str
    """File, or folder."""
    prompt_key: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages."""
    answer_key: str | None = "answer"
    """Column with the reference answer; a row without it has none."""
    layout: Literal["rows", "conversations", "choices"] = "rows"
    """What the prompt's column holds: a prompt; a whole conversation, of which the last turn is the answer; or a question, to
    which the choices are added, so that the answer is a letter."""
    choices: list[str] = Field(["choices"], min_length=1)
    """For `layout = "choices"`: the column with the list of choices, or a column for each, such as `["a0", "a1", "a2"]`."""


class ReasoningGymDataConfig(DataSection):
    """Problems made by reasoning-gym, with its verifier (`reward.type = "reasoning_gym"`)."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Name of the source."""
    task: str
    """Name of the generator, for example `chain_sum`."""
    size: int = Field(10_000, ge=1)
    """Number of problems."""
    seed: int = 0
    """Seed of the problems; use another one for held-out data."""
    options: dict[str, Any] = {}
    """Settings of the generator, for example `{min_terms = 2, max_terms = 2}`."""


class GeneratorDataConfig(DataSection):
    """Rows made by a function of your own, or by one of relax's: `relax.data.arithmetic:addition`."""

    type: Literal["generator"] = "generator"
    """Name of the source."""
    path: str
    """Dotted path, `package.module:function`, called as `f(index, seed, **options)` for one row as a dict."""
    size: int = Field(10_000, ge=1)
    """Number of rows."""
    seed: int = 0
    """Seed of the rows; use another one for held-out data."""
    prompt_key: str = "prompt"
    """Key of the prompt in the rows."""
    answer_key: str | None = "answer"
    """Key of the reference answer in the rows."""
    options: dict[str, Any] = {}
    """Passed to the function as keyword arguments."""


DataConfig = Annotated[FileDataConfig | ReasoningGymDataConfig | GeneratorDataConfig, Field(discriminator="type")]


class EvalConfig(Section):
    """Held-out evaluation."""

    data: DataConfig
    """Held-out prompts."""
    every: int = Field(0, ge=0)
    """Evaluate every so many steps, beside the evaluations before and after training; 0: only those two."""
    num_prompts: int = Field(256, ge=1)
    """How many prompts are used, from the start of the data."""
    samples_per_prompt: int = Field(1, ge=1)
    """Responses of each prompt; above 1 pass@k is reported."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 takes the most likely token."""
    max_new_tokens: int | None = None
    """Longest response; default `rollout.max_new_tokens`."""


class RunEvalConfig(EvalConfig):
    """Held-out evaluation, which runs beside training."""

    reward: RewardConfig | None = None
    """How held-out responses are scored. Default: as those of training, by `[reward]`."""
    by: str | None = None
    """Column of the rows, such as the kind of question, for each of whose values the accuracy is given as well."""
