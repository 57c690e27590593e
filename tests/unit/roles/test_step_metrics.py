"""Step metrics are sums over all rows of the step, however they streamed in."""

import numpy as np
import pytest

from relax.roles.rows import Rows
from relax.roles.step_metrics import StepMetrics
from relax.types import Ragged


def _rows(rewards: list[float], groups: list[int], lengths: list[int], versions: list[int], outcomes: list[str]) -> Rows:
    mask = Ragged.pack([np.array([0, *[1] * n], np.uint8) for n in lengths])
    segments = [[[1, version]] for version in versions]
    columns = {"loss_mask": mask, "reward": np.array(rewards), "segments": segments, "outcome": outcomes}
    return Rows(columns, np.array(groups, np.int64))


def test_split_into_leases_changes_nothing() -> None:
    rows = ([1.0, 0.0, 1.0, 1.0], [4, 4, 9, 9], [3, 5, 2, 7], [6, 6, 5, 7], ["ok", "truncated", "ok", "ok"])
    whole, split = StepMetrics(7, 7, 0.0), StepMetrics(7, 7, 0.0)
    whole.add_rows(_rows(*rows))
    split.add_rows(_rows(*(column[:2] for column in rows)))
    split.add_rows(_rows(*(column[2:] for column in rows)))
    finished = whole.finish({"lr": 0.1}, 2.0), split.finish({"lr": 0.1}, 2.0)
    keys = set(finished[0]) - {"train_s"}
    assert {k: finished[0][k] for k in keys} == {k: finished[1][k] for k in keys}
    row = finished[0]
    assert row["step"] == 8
    assert row["reward/mean"] == pytest.approx(0.75)
    assert row["reward/zero_signal_groups"] == 1
    assert row["reward/std_within_group"] == pytest.approx(0.25)
    assert (row["age/max"], row["age/mean"]) == (2, pytest.approx(1.0))
    assert (row["age/count_0"], row["age/count_1"], row["age/count_2"]) == (1, 2, 1)
    assert row["response/truncated_fraction"] == pytest.approx(0.25)
    assert row["tokens/trained"] == 17
    assert row["tokens_per_s"] == pytest.approx(8.5)
