"""What a reward model learns from: pairs of a better and a worse response, or responses with a number.

A conversation is rendered whole, and the reward is read at its last token. To the back end that is the value of what stands
before one more token, which nobody looks at: so each sequence gets one, and only that is marked.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from relax.config.data import DataConfig
from relax.config.sft import RewardModelTaskConfig
from relax.data.media.rows import MediaRows
from relax.data.render import Message, Renderer
from relax.data.rows import BadRow, RowReader, nearest
from relax.train.conversations import (
    check_length,
    key_columns,
    place_media,
    read_number,
    refuse_forgotten,
    said_messages,
)
from relax.train.lessons import Learned, Lesson
from relax.types import Prompt


class Preferences:
    """Reads rows as `task` says. `sees`: kinds of media that the model reads, which no row may have without `media`.

    Raises `BadRow` or `DataError`, and `ConfigError` for media that would not be shown.
    """

    def __init__(
        self,
        data: DataConfig,
        task: RewardModelTaskConfig,
        renderer: Renderer,
        *,
        max_tokens: int,
        media: MediaRows | None = None,
        sees: Collection[str] = (),
    ) -> None:
        self._data, self._task, self._renderer, self._max_tokens = data, task, renderer, max_tokens
        self._media, self._sees = media, sees
        self._prompt_key, self._answer_key = key_columns(data)
        self._reader = RowReader(self._prompt_key, None, data.chat_template, media)
        self._pad = padding_id(renderer.tokenizer)

    def read(self, raw: Any, key: str) -> Lesson:
        """Better and worse response of a pair, or the one response with its number."""
        task = self._task
        if not isinstance(raw, Mapping):
            raise BadRow(f"a row must be an object with named columns, and is {type(raw).__name__}")
        if self._media is None:
            refuse_forgotten(raw, self._sees, key)
        if task.loss != "bradley_terry":
            is_whole = self._answer_key is None or self._answer_key not in raw
            label = read_number(raw, task.label_key)
            if task.loss == "logistic" and not 0 <= label <= 1:
                raise BadRow(f'{task.label_key!r} is {label}: with task.loss = "logistic" it is a probability, from 0 to 1')
            column = self._prompt_key if is_whole else str(self._answer_key)
            said = self._conversation(raw, column, key)
            return (read_last(self._ids(said), self._pad, label, said),)
        better, worse = (self._conversation(raw, column, key) for column in (task.chosen_key, task.rejected_key))
        chosen, rejected = self._ids(better), self._ids(worse)
        if chosen == rejected:
            raise BadRow(f"{task.chosen_key!r} and {task.rejected_key!r} are the same: neither is better")
        if better.media and _shown(better) != _shown(worse):
            raise BadRow(
                f"{task.chosen_key!r} and {task.rejected_key!r} are different before their last media, which they share"
            )
        margin = 0.0 if task.margin_key is None else read_number(raw, task.margin_key)
        return read_last(chosen, self._pad, margin, better), read_last(rejected, self._pad, shown=better)

    def _ids(self, said: Prompt) -> list[int]:
        ids = self._renderer.whole_ids(said.messages if said.text is None else said.text, said.key)
        check_length(ids, self._max_tokens)
        return ids

    def _conversation(self, raw: Mapping[str, Any], column: str, key: str) -> Prompt:
        """The response in `column` behind the row's prompt, if it is not a whole conversation already."""
        if column not in raw:
            raise BadRow(f"there is no column {column!r}; {nearest(column, list(raw))}")
        said, has_prompt = raw[column], self._prompt_key in raw and column != self._prompt_key
        messages = said_messages(raw, column, with_media=self._media is not None)
        if not self._data.chat_template:
            if not isinstance(said, str):
                raise BadRow(f"{column!r} must be a text with data.chat_template = false, and is {type(said).__name__}")
            return Prompt(key, text=f"{self._reader.read(raw, key).text if has_prompt else ''}{said}")
        if isinstance(said, str) and has_prompt:
            messages = ({"role": "assistant", "content": said},)
        if messages is None:
            raise BadRow(
                f"{column!r} must be a response to the column {self._prompt_key!r}, or a list of chat messages that ends with "
                "the assistant's turn"
            )
        if messages[0]["role"] == "assistant" and has_prompt:
            before = self._reader.read(raw, key)
            return replace(before, messages=(*before.messages, *messages))
        return place_media(self._media, raw, messages, key)


def _shown(said: Prompt) -> tuple[Message, ...]:
    """The messages up to the last one with media."""
    last = max(number for number, message in enumerate(said.messages) if not isinstance(message["content"], str))
    return said.messages[: last + 1]


def read_last(ids: list[int], pad: int | None, target: float = 0.0, shown: Prompt | None = None) -> Learned:
    """The sequence, to be read at its last token that is no padding, as transformers' classifiers read it. `shown`: the
    conversation, or another one with the same media."""
    length = max((place for place, token in enumerate(ids) if token != pad), default=len(ids) - 1) + 1
    mask = np.zeros(length + 1, np.uint8)
    mask[-1] = 1
    media = shown if shown is not None and shown.media else None
    return Learned(np.asarray([*ids[:length], 0], np.int32), mask, target, media)


def padding_id(tokenizer: Any) -> int | None:
    """The token that the classifier takes for padding."""
    pad: int | None = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return pad
