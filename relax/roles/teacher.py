"""The teacher of on-policy distillation: how likely it finds what the policy wrote.

rows of rollout --teacher's weights, one forward--> `teacher_logprobs`, or its likeliest tokens at each place (`opd_full`)
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from relax.config.algorithm import OPDFullConfig
from relax.config.run import RunConfig
from relax.errors import ConfigError, ModelError
from relax.models.folder import read_model_folder
from relax.roles.columns import ColumnMaker
from relax.roles.logprobs import to_rows
from relax.roles.role import MakeBackend
from relax.roles.topology import teacher_columns
from relax.train.backend import NO_FEATURES, GroupFeatures, TrainBackend
from relax.types import Column, Ragged


class Teacher(ColumnMaker):
    """Log-probs at the sampling temperature, with a back end of its own that never learns; the same inside the actor."""

    needs = ("tokens", "loss_mask")
    max_groups = 32
    reads_media = True

    def __init__(self, config: RunConfig, make_backend: MakeBackend) -> None:
        self.columns = teacher_columns(config.algorithm)
        self._config, self._make_backend = config, make_backend
        self._backend: TrainBackend | None = None
        self._num_ids = 0

    def load(self) -> None:
        """Raises `ConfigError` when more tokens are to be told apart than there are."""
        config, algorithm = self._config, self._config.algorithm
        assert config.teacher is not None, f"{algorithm.type} without a teacher"
        assert config.teacher.model is not None, "a teacher behind a server is a ServedTeacher"
        if isinstance(algorithm, OPDFullConfig):
            # ids beyond the policy's own are padding, or tokens that it cannot write
            self._num_ids = min(read_model_folder(model).vocab_size for model in (config.model, config.teacher.model))
            if algorithm.top_k > self._num_ids:
                raise ConfigError(
                    f"algorithm.top_k = {algorithm.top_k}: policy and teacher share {self._num_ids} tokens; use at most so many"
                )
        self._backend = self._make_backend(config.model_copy(update={"model": config.teacher.model}))

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        assert self._backend is not None
        batch, algorithm = to_rows(columns, group_ids, features), self._config.algorithm
        if isinstance(algorithm, OPDFullConfig):
            ids, logprobs = self._backend.top_logprobs(batch, algorithm.top_k, self._num_ids)
            return {"teacher_top_ids": ids, "teacher_top_logprobs": _whole(logprobs)}
        return {"teacher_logprobs": _whole(self._backend.logprobs(batch))}


def _whole(logprobs: Ragged) -> Ragged:
    """NaN would say that nobody was asked; here the model itself is broken."""
    if np.isnan(logprobs.values).any():
        raise ModelError("teacher.model.path: the teacher's log-probs are not numbers: its weights are damaged, or overflow")
    return logprobs
