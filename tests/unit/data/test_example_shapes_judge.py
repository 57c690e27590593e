"""The example of a judge that sees: half of its lessons are right, and the run asks as the lessons do."""

from collections import Counter
from pathlib import Path

from examples.shapes_judge.lessons import lesson
from examples.shapes_vqa.shapes import question
from relax.cli.sft import load_sft_config
from relax.config import load_config
from relax.config.genrm import LocalJudgeConfig
from relax.config.reward import GenRMRewardConfig
from relax.rewards.genrm import make_genrm
from relax.rewards.verdict import read_verdict

FOLDER = Path(__file__).parents[3] / "examples" / "shapes_judge"


def test_half_of_the_lessons_are_right_and_their_verdicts_true() -> None:
    reward, said = load_config(FOLDER / "run.toml").reward, Counter[str]()
    assert isinstance(reward, GenRMRewardConfig)
    for index in range(400):
        row, asked = lesson(index, 1), question(index, 1)
        claim = row["prompt"].removeprefix(f"{asked['prompt']}\n")
        assert row["images"] == asked["images"]
        assert row["answer"] == ("yes" if claim == asked["answer"] else "no")
        assert row["solution"] == f"{asked['answer']}\n{row['answer']}"
        assert read_verdict(reward.verdict, row["solution"]) == float(claim == asked["answer"])
        said[row["answer"]] += 1
    assert 170 < said["yes"] < 230


def test_the_run_asks_the_judge_that_sft_writes_in_the_form_of_its_lessons() -> None:
    sft, run = load_sft_config(FOLDER / "sft.toml", []), load_config(FOLDER / "run.toml")
    assert isinstance(run.reward, GenRMRewardConfig)
    shown = {"type": "image", "source": "a.png"}
    prompt = [{"role": "user", "content": [shown, {"type": "text", "text": "Which colour?"}]}]
    judged = make_genrm(run.reward).call.__self__  # type: ignore[attr-defined]
    assert judged._render(prompt, "red\n", None, {}) == [shown, {"type": "text", "text": "Which colour?\nred"}]
    assert run.genrm is not None
    judge = run.genrm.judges[run.reward.route]
    assert isinstance(judge, LocalJudgeConfig)
    assert judge.model.path == sft.output.path
    assert run.rewards["eval.reward"].type == "exact"
    assert sft.eval is not None
    assert sft.eval.data.seed != sft.data.seed
