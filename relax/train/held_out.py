"""Held-out evaluation of what says numbers: the share of pairs that a reward model is right about, or a correlation."""

import numpy as np
from numpy.typing import NDArray

from relax.errors import DataError
from relax.models.preparer import Preparer
from relax.train.backend import TrainBackend
from relax.train.lessons import Lesson, Lessons, decode, to_batch
from relax.train.scalar_backend import ScalarBackend

_Numbers = NDArray[np.float64]
_AT_ONCE = 32  # rows whose media are in memory


class HeldOut:
    """The first `count` of `rows` that are not trained on: pairs, or sequences whose targets are numbers. `preparer`: of their
    media."""

    def __init__(self, rows: Lessons, count: int, preparer: Preparer) -> None:
        self._rows, self._preparer = rows, preparer
        self._lessons: list[Lesson] = [rows.row(index) for index in range(min(count, len(rows)))]
        self._is_started = False
        self._is_pairs = len(self._lessons[0]) == 2
        self.name = "accuracy" if self._is_pairs else "correlation"

    async def score(self, backend: TrainBackend, version: int) -> float:
        """Accuracy on pairs, in which a tie is half right; or Pearson's correlation over all tokens that are read, 0 where one
        side never changes."""
        assert isinstance(backend, ScalarBackend), "a back end that says numbers"
        if not self._is_started:
            await self._preparer.start()
            self._is_started = True
        found = [await self._said(backend, start) for start in range(0, len(self._lessons), _AT_ONCE)]
        said, targets = (np.concatenate(column) for column in zip(*found, strict=True))
        if not len(said):
            raise DataError(f"eval.data: none of {len(self._lessons)} rows can be read: {self._rows.last_refusal}")
        if self._is_pairs:
            gaps = said[0::2] - said[1::2]
            return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))
        if said.std() == 0 or targets.std() == 0:
            return 0.0
        return float(np.corrcoef(said, targets)[0, 1])

    async def _said(self, backend: ScalarBackend, start: int) -> tuple[_Numbers, _Numbers]:
        """What is said of the tokens that are read of some rows, and the targets."""
        part, then = (self._lessons[at : at + _AT_ONCE] for at in (start, start + _AT_ONCE))
        lessons = await decode(part, self._preparer, self._rows, then)
        if not lessons:
            return np.zeros(0), np.zeros(0)
        batch = to_batch(lessons)
        assert batch.returns is not None, "lessons have targets"
        is_read = batch.loss_mask.values != 0
        said = backend.values(batch).values[is_read].astype(np.float64)
        return said, batch.returns.values[is_read].astype(np.float64)

    async def close(self) -> None:
        await self._preparer.close()
