"""Advantages against plain Python loops in double precision, for groups of any size, interleaved."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_advantages import loop_advantages

from relax.algorithms.advantages import advantages
from relax.algorithms.table import (
    ALGORITHMS,
    estimator_columns,
    has_advantages,
    has_critic,
    is_whole_batch,
    needed_columns,
)
from relax.config import algorithm as a
from relax.errors import ConfigError
from relax.types import Ragged

IN_REWARD = {"kl": a.RewardKLConfig(coef=0.3)}
SETTINGS = {
    "grpo": [a.GRPOConfig(), a.GRPOConfig(normalize_std=False, **IN_REWARD)],
    "dr_grpo": [a.DrGRPOConfig(), a.DrGRPOConfig(kl=a.RewardKLConfig(coef=0.3, kind="k2"))],
    "rloo": [a.RLOOConfig(), a.RLOOConfig(old_logprobs="recompute", kl=a.RewardKLConfig(coef=0.1, kind="k3"))],
    "reinforce_pp": [a.ReinforcePPConfig(**IN_REWARD), a.ReinforcePPConfig(gamma=0.9), a.ReinforcePPConfig(gamma=0.0)],
    "reinforce_pp_baseline": [a.ReinforcePPBaselineConfig()],
    "ppo": [a.PPOConfig(), a.PPOConfig(whiten=False, gamma=0.9, gae_lambda=0.8, **IN_REWARD), a.PPOConfig(gae_lambda=0.0)],
    "dapo": [a.DAPOConfig(shaping=a.OverlongShapingConfig(overlong_buffer=0))],
    "gspo": [a.GSPOConfig()],
    "sapo": [a.SAPOConfig()],
    "cispo": [a.CISPOConfig(normalize_std=False)],
    "reinforce": [a.ReinforceConfig()],
    "opd": [a.OPDConfig(coef=0.5), a.OPDConfig(reward_coef=2.0, old_logprobs="recompute")],
    "opd_full": [],
    "custom": [],
}
CASES = [config for name in ALGORITHMS for config in SETTINGS[name]]  # a new line of the table needs its settings here
COLUMNS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
every_case = pytest.mark.parametrize("config", CASES, ids=lambda c: "-".join([c.type, *sorted(map(str, c.model_fields_set))]))
LONGEST = 10


def make_rows(sizes=(1, 3, 4, 8), seed=3, lengths=(1, 9)):
    """Rows of groups of these sizes, interleaved; one of them has no trained token."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in rng.permutation(np.repeat([70, -2, 5, 11][: len(sizes)], sizes)).tolist():
        length = int(rng.integers(*lengths))
        row = {"group": group, "reward": float(rng.choice([0.0, 0.25, 1.0])), "mask": (rng.random(length) < 0.6).tolist()}
        rows.append(row | {name: rng.normal(-1.0, 0.5, length).tolist() for name in COLUMNS})
    rows[4]["mask"] = [0] * len(rows[4]["mask"])
    return rows


def columns_of(rows, masked=np.nan):
    """What the estimators are given, with `masked` where nothing is trained; float64, to compare exactly."""
    mask = Ragged.pack([np.asarray(row["mask"], np.uint8) for row in rows])
    columns = {"reward": np.asarray([row["reward"] for row in rows]), "loss_mask": mask}
    for name in COLUMNS:
        values = np.concatenate([np.asarray(row[name], np.float64) for row in rows])
        columns[name] = Ragged(np.where(mask.values != 0, values, masked), mask.offsets)
    return columns, np.asarray([row["group"] for row in rows])


def estimate(config, rows, **kwargs):
    columns, groups = columns_of(rows, **kwargs)
    return advantages(config, columns, group_ids=groups, length_budget=LONGEST)


@every_case
def test_matches_the_loop_for_interleaved_groups_of_1_3_4_and_8(config):
    rows = make_rows()
    made = estimate(config, rows)
    wanted = dict(zip(("advantages", "returns"), loop_advantages(config, rows), strict=True))
    assert set(made) == ({"advantages", "returns"} if has_critic(config) else {"advantages"})
    for name, column in made.items():
        assert column.values.dtype == np.float32
        for index, row in enumerate(rows):
            expected = [wanted[name][index].get(t, 0.0) for t in range(len(row["mask"]))]
            assert np.allclose(column[index], expected, rtol=2e-6, atol=1e-6)
            assert not column[index][np.asarray(row["mask"]) == 0].any()


@every_case
def test_what_masked_tokens_hold_does_not_matter(config):
    rows = make_rows(seed=5)
    first, second = estimate(config, rows, masked=np.nan), estimate(config, rows, masked=np.inf)
    for name, column in first.items():
        assert np.array_equal(column.values, second[name].values)


@every_case
def test_a_tool_turn_in_the_middle_changes_nothing(config):
    """Tokens that the policy did not write are no steps: not for discounts, not for the critic, not for whitening."""
    rows = make_rows(seed=6)
    longer = []
    for row in rows:
        middle = len(row["mask"]) // 2
        spliced = {name: [*row[name][:middle], 9.0, 9.0, 9.0, *row[name][middle:]] for name in COLUMNS}
        longer.append(row | spliced | {"mask": [*row["mask"][:middle], 0, 0, 0, *row["mask"][middle:]]})
    plain, found = estimate(config, rows), estimate(config, longer)
    for name, column in plain.items():
        for index, (before, after) in enumerate(zip(rows, longer, strict=True)):
            kept = found[name][index][np.asarray(after["mask"]) != 0]
            assert np.array_equal(kept, column[index][np.asarray(before["mask"]) != 0])


@every_case
def test_a_trajectory_cut_into_rows_has_the_advantages_of_the_whole(config):
    """Its reward counts once, and a discount runs on from one row into the next."""
    rows, cut, numbers = make_rows(seed=7), [], []
    for number, row in enumerate(rows):
        middle = len(row["mask"]) // 2 if number % 2 else 0
        for piece in (slice(0, middle), slice(middle, None)) if middle else (slice(0, None),):
            cut.append({k: v[piece] if isinstance(v, list) else v for k, v in row.items()})
            numbers.append(number)
    columns, groups = columns_of(cut)
    found = advantages(config, columns | {"trajectory": np.asarray(numbers)}, group_ids=groups, length_budget=LONGEST)
    for name, column in estimate(config, rows).items():
        assert np.allclose(found[name].values, column.values, rtol=1e-6, atol=1e-6)


@every_case
def test_only_a_whole_batch_estimator_needs_the_whole_batch(config):
    rows = make_rows(seed=8)
    whole = estimate(config, rows)["advantages"]
    apart = np.concatenate([whole[index] for index, row in enumerate(rows) if row["group"] == 11])
    alone = estimate(config, [row for row in rows if row["group"] == 11])["advantages"].values
    assert np.allclose(apart, alone, rtol=1e-6, atol=1e-7) == (not is_whole_batch(config))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=24), st.sampled_from(CASES))
def test_any_rewards_match_the_loop(pairs, config):
    rows = [{"group": g, "reward": r / 3, "mask": [1]} | {name: [-1.0] for name in COLUMNS} for g, r in pairs]
    found, (wanted, _) = estimate(config, rows)["advantages"], loop_advantages(config, rows)
    expected = np.asarray([w[0] for w in wanted])
    if is_whole_batch(config) and np.ptp(expected) < 1e-6:
        return  # whitened rounding: exactly 0 here, and noise in the loop
    assert np.allclose(found.values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [c for c in CASES if c.compares_members], ids=lambda c: c.type)
def test_equal_rewards_give_exactly_zero(config):
    """0.1 has no exact mean: without care, rounding noise over a deviation of 1e-6 would look like a signal."""
    rows = [{"group": 0, "reward": 0.1, "mask": [1] * 3} | {name: [-1.0] * 3 for name in COLUMNS} for _ in range(7)]
    assert not estimate(config, rows)["advantages"].values.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_a_finite_reward_is_a_mistake(bad):
    rows = [row | {"reward": bad} for row in make_rows()[:2]]
    with pytest.raises(AssertionError, match="no finite reward"):
        estimate(a.GRPOConfig(), [*rows, *make_rows()])


def test_a_trained_token_without_a_value_is_a_mistake_that_names_the_column():
    rows = make_rows()
    rows[0]["mask"], rows[0]["values"] = [1] * len(rows[0]["mask"]), [np.nan] * len(rows[0]["mask"])
    with pytest.raises(AssertionError, match="'values'"):
        estimate(a.PPOConfig(), rows)


def test_rewards_are_taken_in_double_precision():
    rows = [{"group": 0, "reward": r, "mask": [1]} | {n: [0.0] for n in COLUMNS} for r in (1e4 + 0.25, 1e4, 1e4 + 0.5)]
    assert estimate(a.DrGRPOConfig(), rows)["advantages"].values.tolist() == [0.0, -0.25, 0.25]


def test_columns_that_somebody_has_to_make():
    assert needed_columns(a.GRPOConfig()) == ("advantages",)
    assert estimator_columns(a.GRPOConfig(kl=a.KLConfig(coef=0.1))) == ()
    assert needed_columns(a.GRPOConfig(kl=a.KLConfig(coef=0.1), old_logprobs="recompute")) == (
        "ref_logprobs", "old_logprobs", "advantages",
    )  # fmt: skip
    assert estimator_columns(a.ReinforcePPConfig(**IN_REWARD)) == ("rollout_logprobs", "ref_logprobs")
    assert needed_columns(a.PPOConfig()) == ("values", "advantages", "returns")
    assert needed_columns(a.OPDConfig(old_logprobs="recompute")) == ("old_logprobs", "teacher_logprobs", "advantages")
    assert needed_columns(a.OPDFullConfig()) == ("teacher_top_ids", "teacher_top_logprobs")
    assert not has_advantages(a.OPDFullConfig())


@pytest.fixture
def my_module(monkeypatch):
    """A module of the user's with estimators."""
    module = types.ModuleType("my_advantages")
    module.calls = []

    def best_of_group(given, *, scale=1.0):
        module.calls.append(len(given.rewards))
        return given.spread(scale * (given.rewards == given.rewards.max()))

    module.best_of_group = best_of_group
    module.wrong = lambda given: given.rewards[:0]
    module.critic = lambda given: {"advantages": -given.columns["values"], "returns": given.spread(given.rewards)}
    module.teacher = lambda given: given.columns["teacher_logprobs"]
    monkeypatch.setitem(sys.modules, "my_advantages", module)
    return module


@pytest.mark.parametrize(("scope", "calls"), [("group", [1, 3, 4, 8]), ("batch", [16])])
def test_a_function_of_ones_own_sees_a_group_or_the_batch(my_module, scope, calls):
    config = a.CustomConfig(path="my_advantages:best_of_group", scope=scope, options={"scale": 2.0})
    rows = make_rows()
    found = estimate(config, rows)["advantages"]
    assert sorted(my_module.calls) == calls
    assert is_whole_batch(config) == (scope == "batch")
    for index, row in enumerate(rows):
        rivals = [r["reward"] for r in rows if scope == "batch" or r["group"] == row["group"]]
        assert found[index].tolist() == [2.0 * (m and row["reward"] == max(rivals)) for m in row["mask"]]


def test_a_function_of_ones_own_reads_the_columns_that_it_needs(my_module):
    config = a.CustomConfig(path="my_advantages:teacher", needs=("teacher_logprobs",))
    assert needed_columns(config) == ("teacher_logprobs", "advantages")
    rows = make_rows()
    found = estimate(config, rows)["advantages"]
    for index, row in enumerate(rows):
        assert found[index].tolist() == [
            np.float32(q) if m else 0.0 for q, m in zip(row["teacher_logprobs"], row["mask"], strict=True)
        ]


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_a_function_of_ones_own_may_have_a_critic(my_module, scope):
    config = a.CustomConfig(path="my_advantages:critic", needs=("values",), scope=scope)
    assert needed_columns(config) == ("values", "advantages", "returns")
    rows = make_rows()
    found = estimate(config, rows)
    for index, row in enumerate(rows):
        assert found["advantages"][index].tolist() == [
            -np.float32(v) if m else 0.0 for v, m in zip(row["values"], row["mask"], strict=True)
        ]
        assert found["returns"][index].tolist() == [np.float32(row["reward"]) * m for m in row["mask"]]
    with pytest.raises(ConfigError, match="without returns"):
        estimate(a.CustomConfig(path="my_advantages:best_of_group", needs=("values",)), rows)


def test_a_function_that_is_wrong_or_missing_is_named(my_module):
    with pytest.raises(ConfigError, match="'my_advantages:wrong': ValueError: advantages has shape"):
        estimate(a.CustomConfig(path="my_advantages:wrong"), make_rows())
    with pytest.raises(ConfigError, match=r"algorithm\.path"):
        estimate(a.CustomConfig(path="my_advantages:worng"), make_rows())


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda given: given.spread(given.rewards) * np.nan, "ValueError: advantages holds a number that is not finite"),
        (lambda given: given.spread(given.rewards * 0 + 1e30), "advantages beyond 1e"),
        (lambda given: "many", "ValueError: advantages: str is not an array of numbers"),
        (lambda given: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda given: sys.exit(3), "SystemExit: 3"),
    ],
)
def test_what_a_function_does_wrong_is_the_users_to_see(my_module, returned, expected):
    my_module.odd = returned
    with pytest.raises(ConfigError, match=rf"algorithm\.path = 'my_advantages:odd'.*{expected}"):
        estimate(a.CustomConfig(path="my_advantages:odd"), make_rows())
