"""Held-out accuracy is told apart by a column of the rows."""

from collections.abc import Sequence

import numpy as np
import pytest

from relax.data.prompts import MOST_KINDS, kinds_of
from relax.errors import ConfigError
from relax.roles.evaluation import summarise
from relax.types import Outcome, Prompt, Sample, VersionSegment


def group(rewards: Sequence[float | None]) -> list[Sample]:
    tokens, mask, logprobs = np.array([1, 2], np.int32), np.array([0, 1], np.uint8), np.zeros(2, np.float32)
    segments = (VersionSegment(0, 2),)
    return [Sample(0, i, tokens, mask, logprobs, segments, Outcome.OK, reward=value) for i, value in enumerate(rewards)]


def test_each_kind_has_the_mean_of_its_own_scored_samples() -> None:
    groups = [group([1.0, 0.0]), None, group([1.0, None]), group([0.0, 0.0]), group([None])]
    found = summarise(3, groups, ["shape", "shape", "colour", "shape", "silent"])
    assert {name: value for name, value in found.items() if "accuracy" in name} == {
        "eval/accuracy": pytest.approx(0.4),
        "eval/accuracy/shape": 0.25,
        "eval/accuracy/colour": 1.0,
    }
    assert not [name for name in summarise(3, groups) if name.startswith("eval/accuracy/")]


def test_a_column_that_is_missing_or_has_too_many_values_is_named() -> None:
    prompts = [Prompt(f"rows.jsonl:{number}", text="?", metadata={"kind": number % 3, "id": number}) for number in range(99)]
    assert kinds_of(prompts, "kind")[:4] == ["0", "1", "2", "0"]
    assert len(set(kinds_of(prompts[:MOST_KINDS], "id"))) == MOST_KINDS
    with pytest.raises(ConfigError, match=r"eval\.by = 'id': the column has 99 values, and at most 32"):
        kinds_of(prompts, "id")
    with pytest.raises(ConfigError, match=r"eval\.by = 'kid': rows\.jsonl:0 has no such column .*did you mean 'kind'"):
        kinds_of(prompts, "kid")
