"""Every reward by its `reward.type`. Adding one: a file with a `make_...(config)`, a config class, and a line here."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relax.config.reward import RewardConfig
from relax.data.dotted import load_function

# Dotted, so that only the chosen reward's libraries are imported.
REWARDS: dict[str, str] = {
    "math": "relax.rewards.math:make_math",
    "dapo": "relax.rewards.dapo:make_dapo",
    "deepscaler": "relax.rewards.deepscaler:make_deepscaler",
    "multiple_choice": "relax.rewards.multiple_choice:make_multiple_choice",
    "f1": "relax.rewards.f1:make_f1",
    "exact": "relax.rewards.exact:make_exact",
    "format": "relax.rewards.format:make_format",
    "regex": "relax.rewards.regex:make_regex",
    "wer": "relax.rewards.wer:make_wer",
    "ocr": "relax.rewards.ocr:make_ocr",
    "iou": "relax.rewards.iou:make_iou",
    "count": "relax.rewards.count:make_count",
    "vqa": "relax.rewards.vqa:make_vqa",
    "json_schema": "relax.rewards.json_schema:make_json_schema",
    "code": "relax.rewards.code:make_code",
    "reasoning_gym": "relax.rewards.reasoning_gym:make_reasoning_gym",
    "remote": "relax.rewards.remote:make_remote",
    "genrm": "relax.rewards.genrm:make_genrm",
    "reward_model": "relax.rewards.reward_model:make_reward_model",
    "diversity": "relax.rewards.diversity:make_diversity",
    "function": "relax.rewards.function:make_function",
}
# Those made of other rewards: they combine results, outside the workers.
COMBINED: dict[str, str] = {
    "sum": "relax.rewards.sum:WeightedSum",
    "rank": "relax.rewards.rank:Rank",
    "by_row": "relax.rewards.by_row:ByRow",
}


@dataclass(frozen=True, slots=True)
class Scorer:
    """A reward ready to be called: `call(prompt, response, answer, metadata)`.

    `prompt` is a text, or a list of chat messages. With `per_group` the second argument is the group's list of responses, and
    the return value a list of as many rewards. With `is_async` the call returns an awaitable.
    """

    call: Callable[[Any, Any, Any, dict[str, Any]], Any]
    per_group: bool = False
    is_async: bool = False
    note: str = ""
    """What the person who runs the job should know, as `relax check` says it."""


def make_scorer(config: RewardConfig) -> Scorer:
    """The scorer that `config` describes. Raises `ConfigError` when it cannot be made."""
    made = load_function(REWARDS[config.type], "reward.type")(config)
    return made if isinstance(made, Scorer) else Scorer(made)


def is_async_function(function: Any) -> bool:
    """Whether calling `function` gives a coroutine; sees through objects with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def text_after(response: str, marker: str) -> str | None:
    """What follows the last `marker`, stripped; None without one. An empty marker gives the whole response."""
    if not marker:
        return response.strip()
    _, found, rest = response.rpartition(marker)
    return rest.strip() if found else None


def text_said(response: str, marker: str) -> str:
    """What a response comes to: behind its thinking, and there behind the last `marker`; empty when the marker is missing."""
    return text_after(response.rpartition("</think>")[2], marker) or ""


def reference_texts(answer: Any, reward: str) -> list[str]:
    """The row's answers as texts, of which each is right. Raises `ValueError` when there is none."""
    if isinstance(answer, list | tuple):
        return [reference_text(item, reward) for item in answer] or [reference_text(None, reward)]
    return [reference_text(answer, reward)]


def written_texts(answer: Any, reward: str) -> list[str]:
    """`reference_texts`, of texts and whole numbers only. Raises `ValueError` for what can be spelled in several ways."""
    for item in answer if isinstance(answer, list | tuple) else [answer]:
        if item is not None and (isinstance(item, bool) or not isinstance(item, str | int)):
            shown = f"a {type(item).__name__}, {str(item)[:80]}"
            raise ValueError(f'reward.type = "{reward}" needs a text or a list of texts, and in the row\'s answer is {shown}')
    return reference_texts(answer, reward)


def reference_text(answer: Any, reward: str) -> str:
    """The row's answer as a text. Raises `ValueError` when the row has none: that is the data's fault, not a wrong response."""
    text = "" if answer is None else str(answer).strip()
    if not text:
        raise ValueError(f'the row has no answer, and reward.type = "{reward}" needs an answer: see data.answer_key')
    return text
