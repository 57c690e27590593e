"""A run whose rewards a judge gives: it learns what the judge likes, in every mode, and its evaluation is scored otherwise."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from judge_model import judge_settings, train_judge

from relax.cli.evaluate import evaluate
from relax.cli.train import train

RunFile = Callable[..., Path]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def judge(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return train_judge(tiny_model, folder)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["colocate", "fully_async"])
def test_a_run_learns_what_its_judge_likes(
    run_file: RunFile, tmp_path: Path, judge: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = [
        *judge_settings(judge),
        "train.num_steps=40",
        "rollout.max_new_tokens=2",
        f"resources.mode={mode}",
        "rollout.max_staleness=0",
    ]
    assert train(run_file(), overrides) == 0
    run_dir = tmp_path / "runs" / "letters"
    steps = rows(run_dir / "metrics.jsonl")
    first, last = (sum(row["reward/mean"] for row in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.15
    assert sum(row["genrm/requests"] for row in steps) > 40 * 8 * 4 * 0.8
    assert sum(row["genrm/cached"] for row in steps) > 0, "many responses begin with the same letter"
    assert len(rows(run_dir / "eval.jsonl")) >= 2
    said = [row for file in (run_dir / "samples").iterdir() for row in rows(file)]
    assert {row["reward"] for row in said} == {0.0, 1.0}
    wrong = [
        row for row in said if row["response"][:1].isascii() and (row["reward"] == 1.0) != ("a" <= row["response"][:1] <= "m")
    ]
    assert len(wrong) < 0.1 * len(said), wrong


def test_relax_eval_asks_the_judge_as_well(
    run_file: RunFile, tmp_path: Path, judge: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "answers.jsonl"
    assert evaluate(run_file(), [*judge_settings(judge), "eval.reward=none"], out=out) == 0
    assert json.loads(capsys.readouterr().out)["eval/prompts"] > 0
    answers = [row for row in rows(out) if row["response"][:1].isascii() and row["response"]]
    assert len(answers) >= 8
    right = [row for row in answers if (row["reward"] == 1.0) == ("a" <= row["response"][:1] <= "m")]
    assert len(right) > 0.9 * len(answers)
