"""The example of a reward model: its pairs are what they say, and the run takes what `relax sft` writes."""

from pathlib import Path

import pytest

from examples.reward_model.pairs import pair
from relax.cli.sft import load_sft_config
from relax.config import load_config
from relax.config.reward import RewardModelRewardConfig
from relax.rewards.exact import make_exact

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "reward_model"


@pytest.mark.parametrize("digits", [1, 3])
def test_the_chosen_sum_is_right_and_the_rejected_one_is_not(digits: int) -> None:
    exact = make_exact(load_config(FOLDER / "run.toml").rewards["eval.reward"])
    for index in range(500):
        row = pair(index, 1, min_digits=1, max_digits=digits)
        left, right = map(int, row["prompt"].removesuffix("=?").split("+"))
        assert exact(row["prompt"], row["chosen"], str(left + right), {}) == 1.0
        assert exact(row["prompt"], row["rejected"], str(left + right), {}) == 0.0


def test_the_run_takes_the_reward_model_that_sft_writes_and_is_judged_by_another_reward() -> None:
    sft, run = load_sft_config(FOLDER / "sft.toml", []), load_config(FOLDER / "run.toml")
    assert isinstance(run.reward, RewardModelRewardConfig)
    assert run.reward.model.path == sft.output.path
    assert run.model.path == sft.model.path, "both begin with the demo's warm start"
    assert run.rewards["eval.reward"].type == "exact"
    assert sft.eval is not None
    assert sft.eval.data.seed != sft.data.seed
