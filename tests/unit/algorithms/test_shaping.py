"""Length in the reward: what advantages see is shaped, what filters see is not."""

import numpy as np
import pytest

from relax.algorithms.advantages import advantages
from relax.algorithms.shaping import is_shaping, overlong, relative_length, shaped
from relax.config.algorithm import DAPOConfig, DrGRPOConfig, GRPOConfig, OverlongShapingConfig, ShapingConfig
from relax.types import Ragged

LONGEST = 100


def dapo_by_hand(length, longest, cache):
    """Equation 13 of the paper, which gives a reward from -1 to 0."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def test_the_punishment_of_overlong_responses_is_that_of_the_paper():
    lengths = np.asarray([0, 1, 79, 80, 81, 90, 99, 100, 101, 500])
    wanted = [dapo_by_hand(length, 100, 20) for length in lengths]
    assert np.allclose(-overlong(lengths, 100, 0.2), wanted)


def test_length_by_rank_in_the_group_is_that_of_the_paper():
    rewards, lengths = np.asarray([1.0, 1.0, 0.0, 0.0, 1.0, 1.0]), np.asarray([10, 20, 10, 30, 7, 7])
    found = relative_length(rewards, lengths, np.asarray([0, 0, 0, 0, 1, 1]))
    assert found.tolist() == [0.5, 0.0, 0.0, -0.5, 0.0, 0.0]


def columns(rewards, lengths):
    return {"reward": np.asarray(rewards), "loss_mask": Ragged.pack([np.ones(n, np.uint8) for n in lengths])}


def estimate(config, rewards, lengths, **more):
    given = columns(rewards, lengths) | more
    return advantages(config, given, group_ids=np.zeros(len(rewards), np.int64), length_budget=LONGEST)


def test_advantages_compare_shaped_rewards_and_the_raw_ones_stay_as_they_are():
    config = DrGRPOConfig(shaping=OverlongShapingConfig())
    given = columns([1.0, 1.0, 0.0], [50, 90, 100])
    made = advantages(config, given, group_ids=np.zeros(3, np.int64), length_budget=LONGEST)
    assert given["reward"].tolist() == [1.0, 1.0, 0.0]
    assert made["shaped_reward"].tolist() == pytest.approx([1.0, 0.5, -1.0])
    assert [made["advantages"][row][0] for row in range(3)] == pytest.approx([5 / 6, 1 / 3, -7 / 6], rel=1e-6)


def test_constant_raw_rewards_look_informative_only_after_shaping():
    """Which is why the filter has to look at the column `reward`, and why there is another for the shaped one."""
    rewards, lengths = [1.0, 1.0, 1.0], [50, 90, 100]
    shaped_rewards = estimate(DAPOConfig(), rewards, lengths)["shaped_reward"]
    assert len(set(rewards)) == 1
    assert len(set(shaped_rewards.tolist())) == 3


def test_the_longest_length_is_the_budget_unless_set():
    settings = {"shaping": ShapingConfig(length_penalty="linear", length_coef=0.5)}
    assert estimate(GRPOConfig(**settings), [1.0, 0.0], [50, 100])["shaped_reward"].tolist() == [0.75, -0.5]
    settings = {"shaping": ShapingConfig(length_penalty="linear", length_coef=0.5, max_length=200)}
    assert estimate(GRPOConfig(**settings), [1.0, 0.0], [50, 100])["shaped_reward"].tolist() == [0.875, -0.25]


def test_length_is_what_was_written_even_where_less_is_trained():
    config = GRPOConfig(shaping=OverlongShapingConfig())
    made = estimate(config, [1.0, 1.0], [5, 5], num_sampled=np.asarray([100, 5]))
    assert made["shaped_reward"].tolist() == [0.0, 1.0]


def test_parts_of_one_trajectory_add_their_lengths_and_share_the_result():
    config = GRPOConfig(shaping=OverlongShapingConfig())
    made = estimate(config, [1.0, 1.0, 1.0], [50, 5, 50], trajectory=np.asarray([4, 2, 4]))
    assert made["shaped_reward"].tolist() == [0.0, 1.0, 0.0]


def test_without_shaping_there_is_no_shaped_reward():
    assert not is_shaping(ShapingConfig())
    assert not is_shaping(ShapingConfig(overlong_buffer=0.2, overlong_penalty=0))
    assert "shaped_reward" not in estimate(GRPOConfig(), [1.0, 0.0], [5, 200])
    lengths, groups = np.asarray([5, 200]), np.zeros(2, np.intp)
    assert shaped(ShapingConfig(), np.ones(2), lengths, groups, LONGEST).tolist() == [1.0, 1.0]
