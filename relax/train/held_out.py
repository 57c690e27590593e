"""Held-out evaluation of what says numbers: the share of pairs that a reward model is right about, or a correlation."""

import numpy as np

from relax.train.backend import TrainBackend
from relax.train.lessons import Lesson, to_batch
from relax.train.scalar_backend import ScalarBackend


class HeldOut:
    """`lessons` that are not trained on: pairs, or sequences whose targets are numbers."""

    def __init__(self, lessons: list[Lesson]) -> None:
        self._batch = to_batch(lessons)
        self._is_pairs = len(lessons[0]) == 2
        self.name = "accuracy" if self._is_pairs else "correlation"

    async def score(self, backend: TrainBackend, version: int) -> float:
        """Accuracy on pairs, in which a tie is half right; or Pearson's correlation over all tokens that are read, 0 where one
        side never changes."""
        assert isinstance(backend, ScalarBackend), "a back end that says numbers"
        assert self._batch.returns is not None, "lessons have targets"
        is_read = self._batch.loss_mask.values != 0
        said = backend.values(self._batch).values[is_read].astype(np.float64)
        if self._is_pairs:
            gaps = said[0::2] - said[1::2]
            return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))
        targets = self._batch.returns.values[is_read].astype(np.float64)
        if said.std() == 0 or targets.std() == 0:
            return 0.0
        return float(np.corrcoef(said, targets)[0, 1])

    async def close(self) -> None:
        """Nothing is held."""
