"""Claimed rows on their way into training: cut into parts, masked where too old, turned into a batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.bus.columns import slice_rows
from relax.train.backend import GroupFeatures, TrainBatch
from relax.types import Column, Ragged

_TO_BATCH = (
    *("rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "values", "returns"),
    *("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"),
)


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of whole groups, one group after the other; `group_ids [N]`, `features` of the media in groups' prompts."""

    columns: dict[str, Column]
    group_ids: NDArray[np.int64]
    features: GroupFeatures = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.group_ids)

    @property
    def num_groups(self) -> int:
        return len(np.unique(self.group_ids))

    def ragged(self, name: str) -> Ragged:
        """A per-token column; it has to be there."""
        column = self.columns[name]
        assert isinstance(column, Ragged), f"{name} is not a column of tokens"
        return column

    def values(self, name: str) -> list[Any]:
        """A column of JSON values; it has to be there."""
        column = self.columns[name]
        assert isinstance(column, list), f"{name} is not a column of JSON values"
        return column

    def parts(self, num_groups: int) -> Iterator["Rows"]:
        """The rows of `num_groups` groups after another, the last part with what is left."""
        starts = np.concatenate(([0], np.flatnonzero(np.diff(self.group_ids)) + 1, [len(self)]))
        cuts = [*starts[:-1:num_groups].tolist(), len(self)]
        for start, end in pairwise(cuts):
            columns = {name: slice_rows(column, start, end) for name, column in self.columns.items()}
            yield Rows(columns, self.group_ids[start:end], self.features)

    def masked_before(self, version: int) -> "Rows":
        """Without the tokens that were sampled under older policies than `version` in the loss."""
        mask = self.ragged("loss_mask")
        keep = token_versions(self.values("segments"), mask.offsets) >= version
        return replace(self, columns=self.columns | {"loss_mask": Ragged(mask.values * keep, mask.offsets)})

    def to_batch(self) -> TrainBatch:
        """The rows as the back end reads them."""
        optional: dict[str, Any] = {name: self.ragged(name) for name in _TO_BATCH if name in self.columns}
        return TrainBatch(self.ragged("tokens"), self.ragged("loss_mask"), self.group_ids, features=self.features, **optional)


def untaught(columns: Mapping[str, Column]) -> NDArray[np.bool_] | None:
    """The rows `[N]` that a teacher gave no answer about: NaN stands for it. None where there is no teacher."""
    told = columns.get("teacher_logprobs", columns.get("teacher_top_logprobs"))
    if told is None:
        return None
    assert isinstance(told, Ragged)
    missing = np.isnan(told.values).reshape(len(told.values), -1).any(-1)
    found: NDArray[np.bool_] = np.logical_or.reduceat(missing, told.offsets[:-1])
    return found


def taught(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The columns, with all tokens of untaught rows out of the loss: what nobody judged counts nowhere, not even as a zero."""
    missing, mask = untaught(columns), columns["loss_mask"]
    if missing is None or not missing.any():
        return dict(columns)
    assert isinstance(mask, Ragged)
    kept = np.where(np.repeat(missing, np.diff(mask.offsets)), 0, mask.values).astype(mask.values.dtype)
    return {**columns, "loss_mask": Ragged(kept, mask.offsets)}


def token_versions(segments: Sequence[Sequence[Sequence[int]]], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The policy version of each token, flat; before a row's first segment, where nothing is trained, that of the first one.

    `segments`: for each row a list of `[start, version]`.
    """
    versions = np.zeros(int(offsets[-1]), np.int64)
    for row, pairs in enumerate(segments):
        begin, end = int(offsets[row]), int(offsets[row + 1])
        for index, (start, version) in enumerate(pairs):
            versions[begin + (start if index else 0) : end] = version
    return versions
