"""What the rollout writes: seeds fixed by (run, prompt, index), columns aligned, the oldest trained version of each row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax.roles.rollout import sample_seeds, to_columns
from relax.types import Outcome, Ragged, Sample, VersionSegment


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_seeds_are_fixed_and_differ(run_seed: int, prompt: int) -> None:
    seeds = sample_seeds(run_seed, prompt, 16)
    assert seeds == sample_seeds(run_seed, prompt, 16)
    assert seeds[:4] == sample_seeds(run_seed, prompt, 4)
    assert len(set(seeds)) == 16
    assert seeds != sample_seeds(run_seed, prompt + 1, 16)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_columns_keep_rows_and_the_oldest_trained_version() -> None:
    first = Sample(
        3, 0, np.array([5, 6, 7], np.int32), np.array([0, 0, 1], np.uint8), np.array([0, 0, -0.5], np.float32),
        (VersionSegment(0, 1), VersionSegment(2, 4)), Outcome.OK, 1.0,
    )  # fmt: skip
    second = Sample(
        3, 1, np.array([5, 6, 8, 9], np.int32), np.array([0, 0, 1, 1], np.uint8), np.array([0, 0, -1, -2], np.float32),
        (VersionSegment(2, 5), VersionSegment(3, 6)), Outcome.TRUNCATED, 0.0,
    )  # fmt: skip
    columns = to_columns([first, second])
    tokens = columns["tokens"]
    assert isinstance(tokens, Ragged)
    assert [row.tolist() for row in (tokens[0], tokens[1])] == [[5, 6, 7], [5, 6, 8, 9]]
    assert np.asarray(columns["versions"]).tolist() == [4, 5]
    assert np.asarray(columns["newest_versions"]).tolist() == [4, 6]
    assert columns["segments"] == [[[0, 1], [2, 4]], [[2, 5], [3, 6]]]
    assert columns["outcome"] == ["ok", "truncated"]
    assert np.asarray(columns["reward"]).tolist() == [1.0, 0.0]
