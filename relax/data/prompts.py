"""Prompts by issue number: the n-th prompt of a run is a pure function of `n`, so a resumed run needs nothing else.

issue -> epoch = issue // len, place = issue % len -> the epoch's permutation (seed, epoch) -> row -> Prompt
"""

import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax.config.data import DataConfig, FileDataConfig, ReasoningGymDataConfig
from relax.data.files import read_files
from relax.data.layouts import lay_out
from relax.data.made import MakeRow, generator_rows, reasoning_gym_rows
from relax.data.media.rows import MediaRows
from relax.data.media.source import Finder, Spool
from relax.data.render import Renderer
from relax.data.rows import BadRow, RowReader, nearest
from relax.errors import ConfigError, DataError
from relax.types import Prompt

KEPT_ROWS = 4096  # made rows that are remembered
MOST_KINDS = 32  # of held-out prompts, each a metric


class PromptSource:
    """Prompts of one `[data]` section. Made by `open_prompts`.

    Rows of files are read and checked at once; rows that are made (reasoning-gym, a function) are made and checked when they
    are asked for.
    """

    def __init__(self, data: DataConfig, seed: int, spool: Spool | None = None) -> None:
        self._data, self._seed = data, seed
        self.spool = (spool or Spool()) if data.media is not None else None  # bytes of media that came inside rows
        self._media = media_rows(data, self.spool)
        self._rows: list[Prompt] = []
        self._make: MakeRow | None = None
        self._size = 0
        self._made: OrderedDict[int, Prompt] = OrderedDict()
        self._bad: set[int] = set()
        self._num_bad_lines = 0
        self._renderer: Renderer | None = None
        self._max_prompt_tokens: int | None = None
        # The epoch in hand and the one before it, which late issues may still ask for.
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """Number of prompts of one epoch."""
        return self._size

    @property
    def num_skipped(self) -> int:
        """Malformed or too long rows that were left out so far."""
        return self._num_bad_lines + len(self._bad)

    def prompt(self, issue: int) -> Prompt:
        """Prompt number `issue` of the run, from 0 without end. Each epoch gives every row once."""
        assert issue >= 0, "issues are counted from 0"
        epoch, place = divmod(issue, self._size)
        return self.row(int(self._order(epoch)[place]) if self._data.shuffle else place)

    def row(self, index: int) -> Prompt:
        """Row `index` in the order of the data.

        Where rows are made and `data.on_bad_row` is "skip", a bad row's place is taken by the next good one. Raises
        `DataError` for a bad row with "error", and when all rows are bad.
        """
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        if self._make is None:
            return self._rows[index]
        for candidate in itertools.chain(range(index, self._size), range(index)):
            if candidate in self._bad:
                continue
            if candidate in self._made:
                return self._made[candidate]
            try:
                prompt = self._make_row(candidate)
            except (BadRow, DataError) as bad:
                self._refuse(f"{_name(self._data)}, row {candidate}", bad)
                self._bad.add(candidate)
                continue
            self._made[candidate] = prompt
            if len(self._made) > KEPT_ROWS:
                self._made.popitem(last=False)
            return prompt
        raise DataError(f'{_name(self._data)}: all {self._size} rows are bad (data.on_bad_row = "skip" left them out)')

    def read(self) -> None:
        """Reads or prepares the data, once."""
        if isinstance(self._data, FileDataConfig):
            self._read_file(self._data)
        else:
            data = self._data
            self._make = reasoning_gym_rows(data) if isinstance(data, ReasoningGymDataConfig) else generator_rows(data)
            self._size = self._data.size
            self.row(0)  # what is wrong with every row shows now

    def limit(self, renderer: Renderer, max_prompt_tokens: int) -> None:
        """Makes rows with more tokens than the limit bad rows."""
        self._renderer, self._max_prompt_tokens = renderer, max_prompt_tokens
        if self._make is not None:
            self._made.clear()
            self.row(0)
            return
        kept = []
        for prompt in self._rows:
            try:
                self._check_length(prompt)
                kept.append(prompt)
            except (BadRow, DataError) as bad:
                self._refuse(f"{_name(self._data)}, {prompt.key}", bad)
                self._num_bad_lines += 1
        if not kept:
            raise DataError(f"{_name(self._data)}: no row is left; every prompt is longer than {max_prompt_tokens} tokens")
        self._rows, self._size = kept, len(kept)
        self._order.cache_clear()

    def _read_file(self, data: FileDataConfig) -> None:
        reader = RowReader(data.prompt_key, data.answer_key, data.chat_template, self._media)
        first, columns, has_answers = "", list[str](), False
        for place, key, raw in read_files(Path(data.path), keep_bytes=self._media is not None):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                row = lay_out(raw, data)
                self._rows.append(reader.read(row, key))
                columns, has_answers = columns or list(raw), has_answers or data.answer_key in row
            except BadRow as bad:
                self._refuse(place, bad)
                self._num_bad_lines += 1
                first = first or f"{place}: {bad}"
        if not self._rows:
            why = f"all {self._num_bad_lines} rows are bad; the first one: {first}" if first else "there are no rows in it"
            raise DataError(f"data.path = {data.path!r}: {why}")
        if not has_answers and data.answer_key not in (None, FileDataConfig.model_fields["answer_key"].default):
            near = nearest(str(data.answer_key), columns)
            raise DataError(f"data.answer_key = {data.answer_key!r}: no row of {data.path} has this column; {near}")
        if self._media is not None and not any(prompt.media for prompt in self._rows):
            raise DataError(no_media(data, self._media.columns, columns))
        self._size = len(self._rows)

    def _make_row(self, index: int) -> Prompt:
        assert self._make is not None
        assert not isinstance(self._data, FileDataConfig)
        if isinstance(self._data, ReasoningGymDataConfig):
            reader, name = RowReader("prompt", "answer", self._data.chat_template), self._data.task
        else:
            columns = (self._data.prompt_key, self._data.answer_key)
            reader, name = RowReader(*columns, self._data.chat_template, self._media), self._data.path
        prompt = reader.read(self._make(index), f"{name}:{self._data.seed}:{index}")
        self._check_length(prompt)
        return prompt

    def _check_length(self, prompt: Prompt) -> None:
        if self._renderer is None or self._max_prompt_tokens is None:
            return
        length = len(self._renderer.prompt_ids(prompt))
        if length > self._max_prompt_tokens:
            raise BadRow(f"the prompt has {length} tokens, and {self._max_prompt_tokens} are allowed (data.max_prompt_tokens)")

    def _refuse(self, place: str, bad: Exception) -> None:
        if self._data.on_bad_row == "error":
            raise DataError(f'{place}: {bad}; data.on_bad_row = "skip" leaves such rows out') from bad

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        # A bit generator's raw stream is the same in every version of numpy; the methods built on it need not be.
        bits = np.random.PCG64(np.random.SeedSequence([abs(self._seed), int(self._seed < 0), epoch]))
        return np.argsort(bits.random_raw(self._size), kind="stable")


def open_prompts(data: DataConfig, *, seed: int, spool: Spool | None = None) -> PromptSource:
    """Opens the data and checks what can be checked at once. `spool`: takes bytes of media, where several sources share one.

    Raises `DataError` for files that are missing, empty or malformed (with file and line), `ConfigError` for an unknown task,
    function or option.
    """
    source = PromptSource(data, seed, spool)
    source.read()
    return source


def media_rows(data: DataConfig, spool: Spool | None) -> MediaRows | None:
    """What reads the media of rows, if they have some; `spool` takes the bytes that come inside rows."""
    if data.media is None or spool is None:
        return None
    return MediaRows(data.media, Finder(data.media, data_folder(data), spool))


def no_media(data: FileDataConfig, wanted: Iterable[str], columns: Iterable[str]) -> str:
    """What is wrong with a file of which no row has media, though `data.media` is set."""
    names = ", ".join(map(repr, wanted))
    return (
        f"data.path = {data.path!r}: no row has media in {names} or in its messages; the columns are {list(columns)}, and "
        'one of another name is told as media = { images = "NAME" }'
    )


def check_lengths(source: PromptSource, renderer: Renderer, max_prompt_tokens: int) -> PromptSource:
    """Treats prompts of more than `max_prompt_tokens` tokens as `data.on_bad_row` says; returns the source.

    Rows of files are checked now, rows that are made when they are asked for. Raises `DataError` naming the row and its
    length, or when no row is left.
    """
    if max_prompt_tokens < 1:
        raise ConfigError(
            f"no room for a prompt: {max_prompt_tokens} tokens are left for it; make rollout.max_new_tokens smaller than the "
            "model's context"
        )
    source.limit(renderer, max_prompt_tokens)
    return source


def kinds_of(prompts: Sequence[Prompt], by: str) -> list[str]:
    """What the column `by` (`eval.by`) says of each prompt. Raises `ConfigError` when it is missing or has too many values."""
    if (lacking := next((prompt for prompt in prompts if by not in prompt.metadata), None)) is not None:
        found = nearest(by, list(lacking.metadata))
        raise ConfigError(f"eval.by = {by!r}: {lacking.key} has no such column beside prompt and answer; {found}")
    kinds = [str(prompt.metadata[by]) for prompt in prompts]
    if len(set(kinds)) > MOST_KINDS:
        raise ConfigError(f"eval.by = {by!r}: the column has {len(set(kinds))} values, and at most {MOST_KINDS} are told apart")
    return kinds


def _name(data: DataConfig) -> str:
    if isinstance(data, ReasoningGymDataConfig):
        return f"data.task = {data.task!r}"
    return f"data.path = {data.path!r}"


def data_folder(data: DataConfig) -> str:
    """Where paths in rows begin, unless the run says another place."""
    if not isinstance(data, FileDataConfig):
        return "."
    return data.path if Path(data.path).is_dir() else str(Path(data.path).parent)
