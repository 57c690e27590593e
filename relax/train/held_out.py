"""Held-out evaluation of what says numbers: the share of pairs that a reward model is right about, or a correlation."""

import numpy as np

from relax.models.preparer import Preparer
from relax.train.backend import TrainBackend, TrainBatch
from relax.train.lessons import Lesson, Lessons, decode, to_batch
from relax.train.scalar_backend import ScalarBackend


class HeldOut:
    """The first `count` of `rows` that are not trained on: pairs, or sequences whose targets are numbers. `preparer`: of their
    media."""

    def __init__(self, rows: Lessons, count: int, preparer: Preparer) -> None:
        self._rows, self._preparer = rows, preparer
        self._lessons: list[Lesson] = [rows.row(index) for index in range(min(count, len(rows)))]
        self._batch: TrainBatch | None = None
        self._is_pairs = len(self._lessons[0]) == 2
        self.name = "accuracy" if self._is_pairs else "correlation"

    async def score(self, backend: TrainBackend, version: int) -> float:
        """Accuracy on pairs, in which a tie is half right; or Pearson's correlation over all tokens that are read, 0 where one
        side never changes."""
        assert isinstance(backend, ScalarBackend), "a back end that says numbers"
        batch = self._batch = self._batch or to_batch(await self._decoded())
        assert batch.returns is not None, "lessons have targets"
        is_read = batch.loss_mask.values != 0
        said = backend.values(batch).values[is_read].astype(np.float64)
        if self._is_pairs:
            gaps = said[0::2] - said[1::2]
            return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))
        targets = batch.returns.values[is_read].astype(np.float64)
        if said.std() == 0 or targets.std() == 0:
            return 0.0
        return float(np.corrcoef(said, targets)[0, 1])

    async def _decoded(self) -> list[Lesson]:
        await self._preparer.start()
        try:
            return await decode(self._lessons, self._preparer, self._rows)
        finally:
            await self._preparer.close()

    async def close(self) -> None:
        """Nothing is held."""
