"""What supervised training learns from: rows of a data section as token ids and a loss mask.

prompt + completion   the prompt as a run would render it, then the answer column, then the end of the turn
chat messages         a list that ends with the assistant's turn is learned as it is, every assistant's turn of it
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.data import DataConfig, FileDataConfig
from relax.data.files import read_files
from relax.data.prompts import PromptSource, open_prompts
from relax.data.render import Renderer
from relax.data.rows import BadRow, RowReader
from relax.errors import DataError
from relax.types import IntArray, MaskArray, Prompt

Learned = tuple[IntArray, MaskArray]  # ids [T] int32, mask [T] uint8: 1 on the tokens to learn


class Conversations:
    """The rows of `data` to learn from, in an order that `seed` fixes. Raises `DataError` for rows that cannot be learned."""

    def __init__(self, data: DataConfig, renderer: Renderer, *, seed: int, max_tokens: int) -> None:
        self._data, self._renderer, self._seed, self._max_tokens = data, renderer, seed, max_tokens
        self._made: PromptSource | None = None
        self._rows: list[tuple[str, Learned]] = []
        self.num_skipped = 0
        if isinstance(data, FileDataConfig):
            self._read_file(data)
        else:
            self._made = open_prompts(data, seed=seed)
        self._order = np.arange(len(self))
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._rows) if self._made is None else len(self._made)

    def batch(self, step: int, size: int) -> list[Learned]:
        """The `size` conversations of step `step`, from 0; every epoch gives each row once."""
        return [self._number(step * size + index) for index in range(size)]

    def _number(self, number: int) -> Learned:
        epoch, place = divmod(number, len(self))
        if self._data.shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([abs(self._seed), epoch]).permutation(len(self))
            self._epoch = epoch
        row = int(self._order[place])
        if self._made is None:
            return self._rows[row][1]
        prompt = self._made.row(row)
        try:
            return self._learned(
                prompt, _completion(prompt, self._data.answer_key if self._data.type == "generator" else "answer")
            )
        except BadRow as bad:
            raise DataError(f"{prompt.key}: {bad}") from bad

    def _read_file(self, data: FileDataConfig) -> None:
        reader = RowReader(data.prompt_key, data.answer_key, data.chat_template)
        for place, key, raw in read_files(Path(data.path)):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                self._rows.append((place, self._read(raw, key, reader, data)))
            except (BadRow, DataError) as bad:
                if data.on_bad_row == "error":
                    raise DataError(f'{place}: {bad}; data.on_bad_row = "skip" leaves such rows out') from bad
                self.num_skipped += 1
        if not self._rows:
            why = f"all {self.num_skipped} rows are bad" if self.num_skipped else "there are no rows in it"
            raise DataError(f"data.path = {data.path!r}: {why}")

    def _read(self, raw: Any, key: str, reader: RowReader, data: FileDataConfig) -> Learned:
        messages = raw.get(data.prompt_key) if isinstance(raw, Mapping) else None
        if isinstance(messages, Sequence) and not isinstance(messages, str) and messages and _is_said(messages[-1]):
            prompt = reader.read({**raw, data.prompt_key: messages[:-1]}, key)
            return self._learned(prompt, messages[-1])
        prompt = reader.read(raw, key)
        return self._learned(prompt, _completion(prompt, data.answer_key))

    def _learned(self, prompt: Prompt, completion: Mapping[str, Any]) -> Learned:
        if prompt.text is None:
            ids, mask = self._renderer.render_chat([*prompt.messages, completion], prompt.key)
        else:
            tokenizer = self._renderer.tokenizer
            before = self._renderer.prompt_ids(prompt)
            said = [*tokenizer(completion["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ids, mask = before + said, [0] * len(before) + [1] * len(said)
        if len(ids) > self._max_tokens:
            raise BadRow(f"the conversation has {len(ids)} tokens, and the model's context is {self._max_tokens}")
        return np.asarray(ids, np.int32), np.asarray(mask, np.uint8)


def _is_said(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _completion(prompt: Prompt, answer_key: str | None) -> Mapping[str, Any]:
    if not isinstance(prompt.answer, str) or not prompt.answer:
        has = "no such column" if prompt.answer is None else f"{type(prompt.answer).__name__} in it"
        raise BadRow(
            f"nothing to learn: the completion is the text in data.answer_key = {answer_key!r}, and the row has {has}; "
            "or the prompt is a list of chat messages that ends with the assistant's turn"
        )
    return {"role": "assistant", "content": prompt.answer}
