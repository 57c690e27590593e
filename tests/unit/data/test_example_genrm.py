"""The example of a judge: half of its lessons are right, every way to be wrong is wrong, and the run asks as the lessons do."""

from collections import Counter
from pathlib import Path

from examples.genrm.lessons import comparison, lesson
from relax.cli.sft import load_sft_config
from relax.config import load_config
from relax.config.genrm import LocalJudgeConfig
from relax.config.reward import GenRMRewardConfig
from relax.rewards.genrm import load_template
from relax.rewards.verdict import read_verdict

FOLDER = Path(__file__).parents[3] / "examples" / "genrm"


def test_half_of_the_lessons_are_right_and_their_verdicts_true() -> None:
    reward, said = load_config(FOLDER / "run.toml").reward, Counter[str]()
    assert isinstance(reward, GenRMRewardConfig)
    for index in range(1000):
        row = lesson(index, 1, min_digits=2, max_digits=3)
        right, claim = row["prompt"].split("\n")
        assert row["answer"] == ("yes" if claim == right else "no")
        assert read_verdict(reward.verdict, row["solution"]) == float(claim == right)
        said[row["answer"]] += 1
    assert 450 < said["yes"] < 550


def test_a_comparison_ends_with_the_first_difference() -> None:
    assert comparison("143", "143") == "11 44 33 .."
    assert comparison("143", "133") == "11 43"
    assert comparison("143", "14") == "11 44 3."
    assert comparison("143", "1430") == "11 44 33 .0"
    assert comparison("143", "14;5") == "11 44 3x"
    assert comparison("143", "") == "1."


def test_the_run_asks_the_judge_that_sft_writes_in_the_form_of_its_lessons() -> None:
    sft, run = load_sft_config(FOLDER / "sft.toml", []), load_config(FOLDER / "run.toml")
    assert isinstance(run.reward, GenRMRewardConfig)
    assert load_template(run.reward).render(answer="143", response="7613;5814=133 \n") == "143\n133"
    assert load_template(run.reward).render(answer="143", response="7613=5814=") == "143\n"
    assert run.genrm is not None
    judge = run.genrm.judges[run.reward.route]
    assert isinstance(judge, LocalJudgeConfig)
    assert judge.model.path == sft.output.path
    assert run.rewards["eval.reward"].type == "exact"
    assert sft.eval is not None
    assert sft.eval.data.seed != sft.data.seed
