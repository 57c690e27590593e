"""A row that cannot be scored is told before the run; one that can is not accused."""

from typing import Any

import pytest

from relax.config.reward import RewardConfig, _One
from relax.rewards.row_check import COMPARING, fault_of
from relax.types import Prompt

BY_ROW = {"type": "by_row", "choices": {"maths": "math", "code": "code"}}


def fault(reward: dict[str, Any], answer: Any = None, **metadata: Any) -> str | None:
    config: RewardConfig = _One.model_validate({"reward": reward}).reward
    return fault_of(config, Prompt("p", text="x", answer=answer, metadata=metadata))


@pytest.mark.parametrize("kind", COMPARING)
def test_rewards_that_compare_need_an_answer(kind: str) -> None:
    reward = {"type": kind, "pattern": "(x)"} if kind == "regex" else {"type": kind}
    assert "needs an answer" in str(fault(reward))
    assert fault(reward, 5) is None


@pytest.mark.parametrize(
    ("reward", "answer", "metadata", "words"),
    [
        ({"type": "multiple_choice"}, "Z", {"choices": ["a", "b"]}, "neither a letter"),
        ({"type": "multiple_choice"}, "B", {"choices": ["a", "b"]}, None),
        ({"type": "code"}, None, {}, "no tests in 'tests'"),
        ({"type": "code"}, None, {"tests": ["assert f()"]}, None),
        ({"type": "json_schema"}, None, {}, "no schema in 'schema'"),
        ({"type": "json_schema", "definition": {}}, None, {}, None),
        ({"type": "reasoning_gym"}, "5", {}, "has no verifier"),
        ({"type": "reasoning_gym"}, None, {"task": "x", "entry": {}}, None),
        (BY_ROW, "5", {}, "no column 'rm_type'"),
        (BY_ROW, "5", {"rm_type": "other"}, "reward.choices has maths, code"),
        (BY_ROW, "5", {"rm_type": "code"}, "neither asserts nor pairs"),
        (BY_ROW, "5", {"rm_type": "maths"}, None),
        ({"type": "sum", "parts": {"a": "diversity", "b": "f1"}}, None, {}, "needs an answer"),
        ({"type": "rank", "parts": {"a": "diversity", "b": "f1"}}, "x", {}, None),
        ({"type": "function", "path": "os:getcwd"}, None, {}, None),
    ],
)
def test_what_a_row_lacks(reward: dict[str, Any], answer: Any, metadata: dict[str, Any], words: str | None) -> None:
    found = fault(reward, answer, **metadata)
    assert found is None if words is None else words in str(found)
