"""Advantages against plain Python loops in double precision, for groups of any size, interleaved."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms.table import ALGORITHMS, advantages
from relax.config.algorithm import DrGRPOConfig, GRPOConfig, RLOOConfig
from relax.types import Ragged

CONFIGS = (GRPOConfig(), GRPOConfig(normalize_std=False), DrGRPOConfig(), RLOOConfig())


def loop_reference(config, rewards, groups):
    """One scalar a row, straight from the definitions."""
    values = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) == 1:
            values.append(0.0)
        elif config.type == "rloo":
            values.append(reward - (math.fsum(members) - reward) / (len(members) - 1))
        else:
            mean = math.fsum(members) / len(members)
            scale = 1.0
            if config.type == "grpo" and config.normalize_std:
                scale = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members)) + 1e-6
            values.append((reward - mean) / scale)
    return values


def masks(lengths, rng):
    return Ragged.pack([(rng.random(n) < 0.6).astype(np.uint8) for n in lengths])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.type}{getattr(c, 'normalize_std', '')}")
def test_matches_the_loop_for_interleaved_groups_of_1_3_4_and_8(config):
    rng = np.random.default_rng(3)
    groups = rng.permutation(np.repeat([70, -2, 5, 11], [1, 3, 4, 8]))
    rewards = rng.choice([0.0, 0.25, 1.0], len(groups))
    mask = masks(rng.integers(1, 9, len(groups)), rng)
    found = advantages(config, rewards=rewards, group_ids=groups, loss_mask=mask)
    assert found.values.dtype == np.float32
    assert np.array_equal(found.offsets, mask.offsets)
    for row, wanted in enumerate(loop_reference(config, rewards.tolist(), groups.tolist())):
        assert np.allclose(found[row], np.where(mask[row], wanted, 0.0), rtol=1e-6, atol=1e-7)
        assert not found[row][mask[row] == 0].any()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=24), st.sampled_from(CONFIGS))
def test_any_rows_match_the_loop(rows, config):
    groups = np.asarray([g for g, _ in rows])
    rewards = np.asarray([r / 3 for _, r in rows])
    mask = Ragged.pack([np.ones(1, np.uint8)] * len(rows))
    found = advantages(config, rewards=rewards, group_ids=groups, loss_mask=mask)
    wanted = loop_reference(config, rewards.tolist(), groups.tolist())
    same = [all(s == rewards[groups == g][0] for s in rewards[groups == g]) for g in groups]
    assert np.allclose(found.values, np.where(same, 0.0, wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_equal_rewards_give_exactly_zero(config):
    """0.1 has no exact mean: without care, rounding noise over a deviation of 1e-6 would look like a signal."""
    mask = Ragged.pack([np.ones(3, np.uint8)] * 7)
    found = advantages(config, rewards=np.full(7, 0.1), group_ids=np.zeros(7, np.int64), loss_mask=mask)
    assert not found.values.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_a_finite_reward_is_a_mistake(bad):
    mask = Ragged.pack([np.ones(1, np.uint8)] * 2)
    with pytest.raises(AssertionError, match="no finite reward"):
        advantages(GRPOConfig(), rewards=np.asarray([1.0, bad]), group_ids=np.zeros(2, np.int64), loss_mask=mask)


def test_float32_rewards_are_taken_in_double_precision():
    rewards = np.asarray([1e4 + 0.25, 1e4, 1e4 + 0.5], np.float32)
    mask = Ragged.pack([np.ones(1, np.uint8)] * 3)
    found = advantages(DrGRPOConfig(), rewards=rewards, group_ids=np.zeros(3, np.int64), loss_mask=mask)
    assert found.values.tolist() == [0.0, -0.25, 0.25]


def test_every_algorithm_of_the_configuration_is_in_the_table():
    assert set(ALGORITHMS) >= {config.type for config in CONFIGS}
