"""The rows of a data section as something to learn from, in an order that a seed fixes.

row of a file, or made -> a task reads it: one sequence, or two that are compared -> a step's batch for the back end
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax.config.data import DataConfig, FileDataConfig, GeneratorDataConfig, ReasoningGymDataConfig
from relax.data.files import read_files
from relax.data.layouts import lay_out
from relax.data.made import MakeRow, generator_rows, reasoning_gym_rows
from relax.data.prompts import no_media
from relax.data.rows import BadRow
from relax.errors import DataError
from relax.models.preparer import Features, Preparer, ReadyPrompt
from relax.train.backend import TrainBatch
from relax.types import IntArray, MaskArray, Prompt, Ragged


class Learned(NamedTuple):
    """A sequence: ids `[T]` int32, mask `[T]` uint8 that is 1 on the tokens to learn, and what a scalar head learns there.

    `shown`: the conversation with its media, where it has some; until they are decoded, `ids` has one place for each. Then
    `features` are what the model's processor made of them.
    """

    ids: IntArray
    mask: MaskArray
    target: float = 0.0
    shown: Prompt | None = None
    features: Features | None = None


Lesson = tuple[Learned, ...]
ReadLesson = Callable[[Any, str], Lesson]


class Lessons:
    """Lessons of `data`, each made by `read(row, key)`, which raises `BadRow` or `DataError` for a row that teaches nothing.

    Rows of files are read at once, those that are made when they are asked for. Raises `DataError` with the row's place, unless
    `data.on_bad_row` is "skip": then the row is left out and counted; one that is made is replaced by the next good one.
    """

    def __init__(self, data: DataConfig, read: ReadLesson, *, seed: int) -> None:
        self._data, self._read, self._seed = data, read, seed
        self._rows: list[Lesson] = []
        self._bad: set[str] = set()
        self.last_refusal = ""  # why the last bad row was left out
        if isinstance(data, FileDataConfig):
            self._read_file(data)
            self._size = len(self._rows)
        else:
            self._make, self._name, self._size = *_maker(data), data.size
        self._order = np.arange(self._size)
        self._epoch = -1

    def __len__(self) -> int:
        return self._size

    @property
    def num_skipped(self) -> int:
        """Bad rows that were left out so far."""
        return len(self._bad)

    def batch(self, step: int, size: int) -> list[Lesson]:
        """The `size` lessons of step `step`, from 0; every epoch gives each row once."""
        return [self._number(step * size + index) for index in range(size)]

    def row(self, index: int) -> Lesson:
        """Row `index` in the order of the data."""
        if isinstance(self._data, FileDataConfig):
            return self._rows[index]
        for candidate in itertools.chain(range(index, self._size), range(index)):
            place = f"{self._name}, row {candidate}"
            try:
                return self._read(self._make(candidate), place)
            except (BadRow, DataError) as bad:
                self.refuse(place, f"{place}: {bad}")
        raise DataError(f"{self._name}: all {self._size} rows are bad")

    def _number(self, number: int) -> Lesson:
        epoch, place = divmod(number, self._size)
        if self._data.shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([abs(self._seed), epoch]).permutation(self._size)
            self._epoch = epoch
        return self.row(int(self._order[place]))

    def _read_file(self, data: FileDataConfig) -> None:
        columns = list[str]()
        for place, key, raw in read_files(Path(data.path), keep_bytes=data.media is not None):
            try:
                if isinstance(raw, BadRow):
                    raise raw
                row = raw if data.layout == "conversations" else lay_out(raw, data)  # conversations are learned whole
                self._rows.append(self._read(row, key))
                columns = columns or list(raw)
            except (BadRow, DataError) as bad:
                self.refuse(place, f"{place}: {bad}")
        if not self._rows:
            why = f"all {self.num_skipped} rows are bad" if self._bad else "there are no rows in it"
            raise DataError(f"data.path = {data.path!r}: {why}")
        if data.media is not None and not any(learned.shown for lesson in self._rows for learned in lesson):
            raise DataError(no_media(data, data.media.columns.values(), columns))

    def refuse(self, place: str, why: str) -> None:
        """Counts a bad row, or raises `DataError` where the data may have none."""
        if self._data.on_bad_row == "error":
            raise DataError(f'{why}; data.on_bad_row = "skip" leaves such rows out')
        self._bad.add(place)
        self.last_refusal = why


def _maker(data: ReasoningGymDataConfig | GeneratorDataConfig) -> tuple[MakeRow, str]:
    """What makes rows, and its name for people."""
    if isinstance(data, ReasoningGymDataConfig):
        return reasoning_gym_rows(data), f"data.task = {data.task!r}"
    return generator_rows(data), f"data.path = {data.path!r}"


async def decode(
    lessons: Sequence[Lesson], preparer: Preparer, rows: Lessons, following: Sequence[Lesson] = ()
) -> list[Lesson]:
    """Lessons of `rows` with their media, which the sequences of one share; those that are `following` are begun.

    One whose media cannot be read is a bad row. Raises `DataError` for it, unless it is left out; so may all of them be.
    """
    shown, later = _shown(lessons), _shown(following)
    asked = [preparer.prepare(prompt, later if prompt is shown[-1] else ()) for prompt in shown]
    ready = dict(zip(map(id, shown), await asyncio.gather(*asked, return_exceptions=True), strict=True))

    def decoded(row: Learned) -> Learned:
        if row.shown is None:
            return row
        if isinstance(found := ready[id(row.shown)], BaseException):
            raise found
        return _with_media(row, row.shown.key, found, preparer.max_tokens)

    good = []
    for lesson in lessons:
        try:
            good.append(tuple(map(decoded, lesson)))
        except DataError as bad:
            rows.refuse(next(row.shown.key for row in lesson if row.shown is not None), str(bad))
    return good


def _shown(lessons: Sequence[Lesson]) -> list[Prompt]:
    return list({id(row.shown): row.shown for lesson in lessons for row in lesson if row.shown is not None}.values())


def _with_media(row: Learned, key: str, ready: ReadyPrompt, max_tokens: int) -> Learned:
    ids, mask = ready.expand(row.ids.tolist(), row.mask.tolist())
    if (length := int(np.flatnonzero(mask)[-1])) > max_tokens:  # the last token that is learned is not read
        raise DataError(f"{key}: with its media the conversation has {length} tokens, and {max_tokens} fit")
    return row._replace(ids=np.asarray(ids, np.int32), mask=np.asarray(mask, np.uint8), features=ready.features)


def to_batch(lessons: Sequence[Lesson]) -> TrainBatch:
    """Lessons as the back end reads them; each is a group, whose common beginning is computed once. The targets stand in
    `returns`, at every token to learn."""
    rows = [learned for lesson in lessons for learned in lesson]
    tokens, mask = Ragged.pack([row.ids for row in rows]), Ragged.pack([row.mask for row in rows])
    returns = Ragged.pack([np.full(len(row.ids), row.target, np.float32) for row in rows])
    groups = np.repeat(np.arange(len(lessons)), [len(lesson) for lesson in lessons])
    features = {int(group): row.features for group, row in zip(groups, rows, strict=True) if row.features}
    return TrainBatch(tokens, mask, groups, returns=returns, features=features)
