"""Rows on their way into training: parts are whole groups, masks follow versions, nothing is lost or mixed up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.roles.rows import Rows, token_versions
from relax.types import Ragged, VersionSegment, newest_version_only, trained_versions


def rows_of(group_sizes: list[int]) -> Rows:
    group_ids = np.repeat(np.arange(len(group_sizes)) * 7, group_sizes)
    lengths = 2 + np.arange(len(group_ids)) % 3
    tokens = Ragged.pack([np.full(length, row, np.int32) for row, length in enumerate(lengths)])
    mask = Ragged(np.ones(len(tokens.values), np.uint8), tokens.offsets)
    return Rows({"tokens": tokens, "loss_mask": mask, "outcome": [f"{row}" for row in range(len(group_ids))]}, group_ids)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 6))
def test_parts_are_whole_groups_in_order(group_sizes: list[int], num_groups: int) -> None:
    rows = rows_of(group_sizes)
    parts = list(rows.parts(num_groups))
    assert [part.num_groups for part in parts[:-1]] == [num_groups] * (len(parts) - 1)
    assert np.concatenate([part.group_ids for part in parts]).tolist() == rows.group_ids.tolist()
    assert [name for part in parts for name in part.values("outcome")] == rows.values("outcome")
    found = [part.ragged("tokens")[row].tolist() for part in parts for row in range(len(part))]
    assert found == [rows.ragged("tokens")[row].tolist() for row in range(len(rows))]


def test_every_token_has_the_version_of_its_segment() -> None:
    versions = token_versions([[[2, 4], [3, 6]], [[1, 5]]], np.array([0, 5, 8]))
    assert versions.tolist() == [4, 4, 4, 6, 6, 5, 5, 5]


def test_tokens_that_are_too_old_leave_the_loss() -> None:
    tokens = Ragged.pack([np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)])
    mask = Ragged.pack([np.array([0, 0, 1, 1, 1], np.uint8), np.array([0, 1, 1], np.uint8)])
    rows = Rows({"tokens": tokens, "loss_mask": mask, "segments": [[[2, 4], [3, 6]], [[1, 5]]]}, np.array([0, 0]))
    masked = rows.masked_before(5).ragged("loss_mask")
    assert masked[0].tolist() == [0, 0, 0, 1, 1]
    assert masked[1].tolist() == [0, 1, 1]
    assert rows.masked_before(7).ragged("loss_mask").values.sum() == 0
    assert rows.ragged("loss_mask").values.sum() == 5, "what was claimed is left as it is"


def test_only_the_newest_version_stays() -> None:
    mask = np.array([0, 1, 1, 0, 1, 1], np.uint8)
    segments = (VersionSegment(1, 3), VersionSegment(3, 4), VersionSegment(5, 4))
    assert newest_version_only(mask, segments).tolist() == [0, 0, 0, 0, 1, 1]
    assert trained_versions(mask, segments) == {3, 4}
    unseen = np.array([0, 1, 1, 0, 0, 0], np.uint8)
    assert newest_version_only(unseen, segments).tolist() == [0, 1, 1, 0, 0, 0], "the newest version that is trained"
    with pytest.raises(ValueError, match="no policy version"):
        trained_versions(np.zeros(6, np.uint8), segments)
