"""What a policy and a critic learn from: rows of a data section as token ids and a loss mask.

prompt + response   the prompt as a run would render it, then the answer column, then the end of the turn
chat messages       a list that ends with the assistant's turn, as it is
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from relax.config.data import DataConfig
from relax.data.media.rows import MediaRows, Mismatch, forgotten_media
from relax.data.render import Message, Renderer
from relax.data.rows import BadRow, RowReader, nearest, read_messages
from relax.errors import ConfigError
from relax.train.lessons import Learned, Lesson
from relax.types import Prompt

LARGEST_NUMBER = 1_000_000  # of a reward, a label or a margin: losses square them and add them up, in float32


class Conversations:
    """Reads rows. Every turn of the assistant is learned, or the `"last"` one only; a message's own mark comes before.

    `reward_key`: the column with what a critic should expect of the response. `sees`: kinds of media that the model reads,
    which no row may have without `media`.
    """

    def __init__(
        self,
        data: DataConfig,
        renderer: Renderer,
        *,
        max_tokens: int,
        loss_on: Literal["assistant", "last"] = "assistant",
        reward_key: str | None = None,
        media: MediaRows | None = None,
        sees: Collection[str] = (),
    ) -> None:
        self._renderer, self._max_tokens, self._loss_on, self._reward_key = renderer, max_tokens, loss_on, reward_key
        self._prompt_key, self._answer_key = key_columns(data)
        self._media, self._sees = media, sees
        self._reader = RowReader(self._prompt_key, self._answer_key, data.chat_template, media)

    def read(self, raw: Any, key: str) -> Lesson:
        """The one sequence of a row. Raises `BadRow` or `DataError`, and `ConfigError` for media that would not be shown."""
        if self._media is None and isinstance(raw, Mapping):
            refuse_forgotten(raw, self._sees, key)
        prompt = self._conversation(raw, key)
        ids, mask = self._render(prompt)
        check_length(ids, self._max_tokens)
        target = 0.0 if self._reward_key is None else read_number(raw, self._reward_key)
        shown = prompt if prompt.media else None
        return (Learned(np.asarray(ids, np.int32), np.asarray(mask, np.uint8), target, shown),)

    def _conversation(self, raw: Any, key: str) -> Prompt:
        """The whole of it as messages; or a plain text, of which the answer is the response."""
        if (messages := said_messages(raw, self._prompt_key, with_media=self._media is not None)) is not None:
            return place_media(self._media, raw, messages, key)
        prompt = self._reader.read(raw, key)
        completion = self._completion(prompt)
        return prompt if prompt.text is not None else replace(prompt, messages=(*prompt.messages, completion))

    def _render(self, prompt: Prompt) -> tuple[list[int], list[int]]:
        if prompt.text is None:
            return self._renderer.render_chat(self._marked(prompt.messages), prompt.key)
        tokenizer, before = self._renderer.tokenizer, self._renderer.prompt_ids(prompt)
        said = [*tokenizer(prompt.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return before + said, [0] * len(before) + [1] * len(said)

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages, each with `train`: whether it is learned."""
        marked = []
        for number, message in enumerate(messages, 1):
            is_said, own = message["role"] == "assistant", _mark(message, number)
            if own and not is_said:
                raise BadRow(f"message {number} is the {message['role']}'s, and only turns of the assistant can be learned")
            is_learned = is_said and (self._loss_on == "assistant" or number == len(messages)) if own is None else own
            kept = {name: value for name, value in message.items() if name != "weight"}
            marked.append(kept | {"train": is_learned})
        return marked

    def _completion(self, prompt: Prompt) -> Mapping[str, Any]:
        if not isinstance(prompt.answer, str) or not prompt.answer:
            has = "no such column" if prompt.answer is None else f"{type(prompt.answer).__name__} in it"
            raise BadRow(
                f"nothing to learn: the response is the text in data.answer_key = {self._answer_key!r}, and the row has {has}; "
                "or the prompt is a list of chat messages that ends with the assistant's turn"
            )
        return {"role": "assistant", "content": prompt.answer}


def key_columns(data: DataConfig) -> tuple[str, str | None]:
    """The columns with prompt and answer."""
    return ("prompt", "answer") if data.type == "reasoning_gym" else (data.prompt_key, data.answer_key)


def said_messages(raw: Any, column: str, *, with_media: bool = False) -> tuple[Message, ...] | None:
    """The chat messages in `column` if they end with the assistant's turn. Raises `BadRow` when they are not chat messages."""
    found = raw.get(column) if isinstance(raw, Mapping) else None
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        return None
    messages = read_messages(found, column, with_media=with_media)
    return messages if messages[-1]["role"] == "assistant" else None


def place_media(media: MediaRows | None, raw: Mapping[str, Any], messages: Sequence[Message], key: str) -> Prompt:
    """A conversation with the media of its row in their places. Raises `BadRow` where they do not fit."""
    try:
        said, items = media.read(raw, messages) if media is not None else (messages, [])
    except Mismatch as why:
        raise BadRow(str(why)) from why
    return Prompt(key, messages=tuple(said), media=tuple(items))


def refuse_forgotten(raw: Mapping[str, Any], sees: Collection[str], key: str, section: str = "data") -> None:
    """Raises `ConfigError` for media in a row that is read without the section's `media`."""
    if fault := forgotten_media(raw, sees):
        raise ConfigError(f"{section}.media {fault} ({key})")


def read_number(raw: Mapping[str, Any], column: str) -> float:
    """The number in `column`. Raises `BadRow`."""
    if column not in raw:
        raise BadRow(f"there is no column {column!r}; {nearest(column, list(raw))}")
    value = raw[column]
    if not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise BadRow(f"{column!r} must be a number from {-LARGEST_NUMBER:,} to {LARGEST_NUMBER:,}, and is {shown}")
    return float(value)


def check_length(ids: Sequence[int], max_tokens: int) -> None:
    """Raises `BadRow` for a conversation that the model has no room for."""
    if len(ids) > max_tokens:
        raise BadRow(f"the conversation has {len(ids)} tokens, and the model's context is {max_tokens}")


def _mark(message: Message, number: int) -> bool | None:
    """What the message itself says about being learned."""
    name = "train" if "train" in message else "weight"
    mark = message.get(name)
    if mark is not None and mark not in (0, 1):
        raise BadRow(f"message {number} has {name} = {mark!r}: a turn is learned (1, true) or not (0, false)")
    return None if mark is None else bool(mark)
