"""Rewards made of rewards: sums, ranks, and the choice of the row; what fails in one part is nobody's zero."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from relax.config.base import Section
from relax.config.load import validate
from relax.config.reward import ByRowRewardConfig, RankRewardConfig, RewardConfig, SumRewardConfig
from relax.errors import ConfigError, RewardError
from relax.rewards.by_row import ByRow
from relax.rewards.pool import RewardPool
from relax.rewards.rank import Rank
from relax.rewards.result import RewardResult
from relax.rewards.sum import WeightedSum
from relax.rewards.tree import RewardTree
from relax.types import Outcome, Prompt

HERE = Path(__file__).parents[2]  # of rewards_under_test.py
FORM = {"type": "format", "pattern": r".*\\boxed.*"}
ROW = Prompt("p:1", text="1+1", answer="2", metadata={"rm_type": "maths"})
VALUES = st.lists(st.none() | st.floats(-100, 100), min_size=1, max_size=8)


class OnlyReward(Section):
    """A file with a reward and nothing else."""

    reward: RewardConfig


def read(reward: dict[str, Any]) -> RewardConfig:
    return validate(OnlyReward, {"reward": reward}).reward


def results(*values: float | None) -> list[RewardResult]:
    return [RewardResult.failed("broken") if value is None else RewardResult(value) for value in values]


async def test_a_row_chooses_its_reward_and_a_sum_weighs_and_records_its_parts() -> None:
    parts = {"right": "math", "form": FORM, "words": "f1"}
    total = {"type": "sum", "parts": parts, "weights": {"form": 0.25, "words": -1}}
    pool = RewardPool(read({"type": "by_row", "choices": {"maths": "math", "all": total}, "default": "all"}))
    await pool.start()
    try:
        assert (await pool.score(ROW, ["4/2"]))[0].value == 1.0
        inner = Prompt("q", text="x", answer="2", metadata={"metadata": {"rm_type": "maths"}})
        assert (await pool.score(inner, ["4/2"]))[0].value == 1.0
        scored = await pool.score(Prompt("q", text="x", answer="2"), ["\\boxed{2}", "\\boxed{3}", "2", "three"])
        assert [result.value for result in scored] == [1.25, 0.25, 0.0, 0.0]
        assert scored[0].parts == {"right": 1.0, "form": 1.0, "words": 0.0, "words.exact": 0.0}
        assert scored[2].parts == {"right": 1.0, "form": 0.0, "words": 1.0, "words.exact": 1.0}
        bare = await pool.score(Prompt("q", text="x"), ["2"])
        assert (bare[0].outcome, bare[0].value) == (Outcome.REWARD_ERROR, None)
        assert str(bare[0].error).startswith("right: ValueError: the row has no answer")
        unknown = await pool.score(Prompt("q:7", text="x", answer="2", metadata={"rm_type": "mths"}), ["2", "3"])
        assert [result.outcome for result in unknown] == [Outcome.REWARD_ERROR] * 2
        assert unknown[0].error == "q:7: the row has rm_type = 'mths', and reward.choices has maths, all"
        assert pool.stats.num_scored == 9
    finally:
        await pool.close()
    strict = ByRow(ByRowRewardConfig(choices={"maths": "math"}))  # type: ignore[dict-item]
    with pytest.raises(RewardError, match=r"no column 'rm_type', and reward\.default is unset"):
        strict.wanted(Prompt("q", text="x"))


@pytest.mark.slow
async def test_parts_of_every_kind_share_the_workers_and_only_what_fails_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr("relax.rewards.pool.ASYNC_GRACE_S", 0.1)
    under_test = "rewards_under_test"
    config = read(
        {
            "type": "sum",
            "time_limit_s": 0.3,
            "parts": {
                "each": {"type": "function", "path": f"{under_test}:act"},
                "later": {"type": "function", "path": f"{under_test}:act_later"},
                "group": {"type": "function", "path": f"{under_test}:lengths", "per_group": True},
            },
        }
    )
    pool = RewardPool(config)
    await pool.start()
    try:
        first, second = await asyncio.gather(
            pool.score(ROW, ["number 1", "loop", "raise x", "number 2"]), pool.score(ROW, ["number 3"] * 10)
        )
        assert [result.value for result in first] == [1 + 1 + 8, None, None, 2 + 2 + 8]
        assert "each: the reward ran past reward.time_limit_s = 0.3" in str(first[1].error)
        assert "each: ValueError: x" in str(first[2].error)
        assert [result.value for result in second] == [3 + 3 + 8] * 10
    finally:
        await pool.close()


@pytest.mark.slow
async def test_a_pool_that_ends_ends_all_parts_of_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    part = {"type": "function", "path": "rewards_under_test:act"}
    pool = RewardPool(read({"type": "sum", "time_limit_s": 60, "parts": {"a": part, "b": part}}))
    await pool.start()
    scoring = asyncio.create_task(pool.score(ROW, ["sleep 60"]))
    await asyncio.sleep(0.05)
    await pool.close()
    with pytest.raises(RewardError, match="closed"):
        await scoring


def test_ranks_are_even_and_equals_share_them() -> None:
    rank = Rank(RankRewardConfig(parts={"a": "exact"}))  # type: ignore[dict-item]

    def ranks(*values: float | None) -> list[float | None]:
        return [result.value for result in rank.combine({"a": results(*values)})]

    assert ranks(3, 1, 2) == [1.0, 0.0, 0.5]
    assert ranks(5, 5, 5) == [0.5] * 3
    assert ranks(1, 2, 2, 9) == [0.0, 0.5, 0.5, 1.0]
    assert ranks(1, None, 9) == [0.0, None, 1.0]  # what failed is neither ranked nor counted
    assert ranks(7) == [0.5]
    assert rank.combine({"a": results(7.0)})[0].parts == {"a": 7.0, "sum": 7.0}


@settings(max_examples=100, deadline=1000)
@given(VALUES, st.floats(0.1, 10), st.floats(-10, 10))
def test_ranks_keep_the_order_and_their_mean_is_a_half(values: list[float | None], weight: float, other: float) -> None:
    rank = Rank(RankRewardConfig(parts={"a": "exact", "b": "exact"}, weights={"a": weight, "b": 1.0}))  # type: ignore[dict-item]
    combined = rank.combine({"a": results(*values), "b": results(*[other] * len(values))})
    ranked = [(result.parts["sum"], result.value) for result in combined if result.value is not None]
    assert [result.value is None for result in combined] == [value is None for value in values]
    assert all(0.0 <= value <= 1.0 for _, value in ranked)
    assert all((a < b) == (x < y) for a, x in ranked for b, y in ranked)
    if ranked:
        assert sum(value for _, value in ranked) / len(ranked) == pytest.approx(0.5)


@settings(max_examples=100, deadline=1000)
@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_a_sum_is_the_sum_and_lacks_what_a_part_lacks(columns: list[list[float | None]], data: st.DataObject) -> None:
    size = min(map(len, columns))
    named: Mapping[str, Sequence[RewardResult]] = {str(i): results(*column[:size]) for i, column in enumerate(columns)}
    weights = {name: data.draw(st.floats(-5, 5)) for name in named if data.draw(st.booleans())}
    config = SumRewardConfig(parts=dict.fromkeys(named, "exact"), weights=weights)  # type: ignore[arg-type]
    for row, result in enumerate(WeightedSum(config).combine(named)):
        values = [column[row] for column in columns]
        if None in values:
            assert (result.value, result.outcome) == (None, Outcome.REWARD_ERROR)
        else:
            expected = sum(weights.get(str(i), 1.0) * value for i, value in enumerate(values) if value is not None)
            assert result.value == pytest.approx(expected)


def test_a_sum_past_all_numbers_is_an_error() -> None:
    total = WeightedSum(SumRewardConfig(parts={"a": "exact"}, weights={"a": 1e300}))  # type: ignore[dict-item]
    assert total.combine({"a": results(1e30)})[0].outcome is Outcome.REWARD_ERROR


def test_leaves_take_the_limits_of_the_whole() -> None:
    tree = RewardTree(
        read({"type": "sum", "time_limit_s": 3, "parts": {"a": "math", "b": {"type": "rank", "parts": {"c": "f1"}}}})
    )
    assert [(leaf.type, leaf.time_limit_s) for leaf in tree.leaves] == [("math", 3.0), ("f1", 3.0)]


def test_a_saved_configuration_is_read_as_it_was() -> None:
    config = read({"type": "rank", "parts": {"a": "math", "b": FORM}, "weights": {"b": 2}})
    adapter: TypeAdapter[Any] = TypeAdapter(RewardConfig)
    assert adapter.validate_python(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"type": "sum"}, "reward.parts: missing"),
        ({"type": "sum", "parts": {}}, "reward.parts needs at least one reward by name"),
        ({"type": "sum", "parts": {"a": "mth"}}, "reward.parts.a.type = 'mth': allowed are 'math'"),
        ({"type": "sum", "parts": {"a": {"type": "format"}}}, "reward.parts.a.pattern: missing"),
        ({"type": "sum", "parts": {"a": {"type": "exact", "markr": "x"}}}, "did you mean reward.parts.a.marker?"),
        ({"type": "rank", "parts": {"a": {"type": "sum", "parts": {"b": "x"}}}}, "reward.parts.a.parts.b.type = 'x'"),
        ({"type": "sum", "parts": {"a": {}}}, "reward.parts.a.type is missing"),
        ({"type": "sum", "parts": {"a": {"type": "math", "time_limit_s": 3}}}, "so set reward.time_limit_s"),
        ({"type": "sum", "parts": {"a": "math"}, "weights": {"b": 1}}, "reward.weights.b: there is no such part"),
        ({"type": "by_row", "choices": {"a": "math"}, "default": "b"}, "reward.default = 'b': reward.choices has a"),
        ({"type": "by_row", "choices": {"a": {"type": "code", "isolation": "no"}}}, "reward.choices.a.isolation = 'no'"),
    ],
)
def test_mistakes_in_parts_are_named_as_the_user_wrote_them(reward: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(reward)
    assert words in str(caught.value)
