"""`relax check` tries the reward in a process of its own, as the run does."""

import pytest

from relax.cli.check import check
from relax.cli.findings import Level


def _errors(report) -> str:
    return "\n".join(f"{finding.about}: {finding.text}" for finding in report.findings if finding.level is Level.ERROR)


def test_a_run_that_nothing_is_wrong_with_passes(small_run):
    report = check(small_run)
    assert report.exit_code == 0, report.render()
    assert not report.warnings or {finding.about for finding in report.warnings} <= {"memory", "cores", "run.dir"}
    assert {"model.path", "data", "reward"} <= {finding.about for finding in report.findings}
    report.raise_on_error()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward.path=os.path:exist"], "did you mean exists"),
        (["reward.path=no_such_module:f"], "no_such_module"),
        (["reward.path=os.path:join", "reward.options={nonsense=1}"], "does not fit"),
    ],
)
def test_a_function_that_cannot_be_called_is_an_error(small_run, overrides, expected):
    report = check(small_run, ["reward.type=function", *overrides])
    assert report.exit_code == 1
    assert expected in _errors(report)


def test_the_template_for_a_judge_is_read_and_so_is_the_reward_of_evaluations(small_run):
    judge = [f"genrm.judges.default.{key}" for key in ("type=openai", "url=http://127.0.0.1:9/v1", "model=m")]
    held_out = ["eval.data.type=generator", "eval.data.path=relax.data.arithmetic:addition", "eval.reward.type=genrm"]
    report = check(small_run, [*judge, *held_out, "eval.reward.template={{ respons }}"])
    assert report.exit_code == 1
    assert "eval.reward: reward.template: there is no 'respons'" in _errors(report)
    assert "reward" in {finding.about for finding in report.findings if finding.level is Level.OK}


@pytest.mark.parametrize("body", ["raise SystemExit(4)", "import os; os._exit(4)"])
def test_a_reward_that_ends_the_process_on_import_is_a_finding(small_run, tmp_path, monkeypatch, body):
    name = f"ends_{len(body)}"
    (tmp_path / f"{name}.py").write_text(f"{body}\n")
    monkeypatch.chdir(tmp_path)
    found = _errors(check(small_run, ["reward.type=function", f"reward.path={name}:f"]))
    assert f"{name}:f" in found
    assert "4" in found
