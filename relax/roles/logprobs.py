"""Log-probs of policies that are not the one in training: the old (proximal) policy, and the reference.

| column | in a role of its own | inside the actor |
|---|---|---|
| `old_logprobs` | the newest published weights | the weights at the beginning of the step |
| `ref_logprobs` | a back end of its own | the actor's back end, the weights swapped for the forward |
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.config.run import RunConfig
from relax.roles.columns import ColumnMaker
from relax.roles.role import MakeBackend
from relax.train.backend import NO_FEATURES, GroupFeatures, TrainBackend, TrainBatch
from relax.train.reference import ReferenceFiles
from relax.types import Column, Ragged, WeightManifest


def to_rows(columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures) -> TrainBatch:
    """The rows as a forward pass reads them."""
    tokens, mask = columns["tokens"], columns["loss_mask"]
    assert isinstance(tokens, Ragged)
    assert isinstance(mask, Ragged)
    return TrainBatch(tokens, mask, group_ids, features=features)


class _Logprobs(ColumnMaker):
    needs = ("tokens", "loss_mask")
    max_groups = 32
    reads_media = True


class PublishedPolicy(_Logprobs):
    """`old_logprobs` under the newest published weights, with a back end of its own."""

    columns = ("old_logprobs",)
    follows_policy = True

    def __init__(self, config: RunConfig, make_backend: MakeBackend) -> None:
        self._config, self._make_backend = config, make_backend
        self._backend: TrainBackend | None = None

    def load(self) -> None:
        self._backend = self._make_backend(self._config)

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        assert self._backend is not None
        return {self.columns[0]: self._backend.logprobs(to_rows(columns, group_ids, features))}

    def adopt(self, manifest: WeightManifest) -> float:
        assert self._backend is not None
        difference = self._backend.load_weights(manifest)
        self.version = manifest.version
        return difference


class Reference(_Logprobs):
    """`ref_logprobs` with a back end of its own. `files`: where a reference that follows the policy keeps its weights."""

    columns = ("ref_logprobs",)
    version: int = 0

    def __init__(self, config: RunConfig, make_backend: MakeBackend, files: ReferenceFiles, first_version: int) -> None:
        self._config, self._make_backend, self._files = config, make_backend, files
        self._first_version = first_version
        self._backend: TrainBackend | None = None
        self.follows_policy = files.every > 0

    def load(self) -> None:
        self._backend = backend = self._make_backend(self._config)
        self._files.begin(backend.weights())
        self._go_to(self._first_version)

    def _go_to(self, version: int) -> None:
        """Back to the weights that the reference had when the policy was at `version`."""
        assert self._backend is not None
        found = self._files.back_to(version)
        if found is not None:
            self.version, weights = found
            self._backend.put_weights(weights)

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        assert self._backend is not None
        return {self.columns[0]: self._backend.logprobs(to_rows(columns, group_ids, features))}

    def adopt(self, manifest: WeightManifest) -> float:
        assert self._backend is not None
        if manifest.version < self.version:
            self._go_to(manifest.version)
        elif self._files.is_due(self.version, manifest.version):
            difference = self._backend.load_weights(manifest)
            self.version = manifest.version
            self._files.keep(self.version, self._backend.weights())
            return difference
        return 0.0


class CurrentPolicy(_Logprobs):
    """`old_logprobs` under the weights of the actor's back end: rows are computed before their step's first update."""

    columns = ("old_logprobs",)

    def __init__(self, backend: TrainBackend) -> None:
        self._backend = backend

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        return {"old_logprobs": self._backend.logprobs(to_rows(columns, group_ids, features))}


class SwappedReference(_Logprobs):
    """`ref_logprobs` with the actor's back end and a copy of the reference's weights, made before a checkpoint is loaded."""

    columns = ("ref_logprobs",)
    version: int = 0

    def __init__(self, backend: TrainBackend, files: ReferenceFiles) -> None:
        self._backend, self._files = backend, files
        self._weights: Mapping[str, Any] = {}

    def load(self) -> None:
        self._weights = {name: tensor.clone() for name, tensor in self._backend.weights().items()}
        self._files.begin(self._weights)

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        return {"ref_logprobs": self._backend.logprobs(to_rows(columns, group_ids, features), self._weights)}

    def resumed(self, version: int) -> None:
        found = self._files.back_to(version)
        if found is not None:
            self.version, self._weights = found

    def published(self, version: int) -> None:
        if self._files.is_due(self.version, version):
            self.version = version
            self._weights = {name: tensor.clone() for name, tensor in self._backend.weights().items()}
            self._files.keep(version, self._weights)
