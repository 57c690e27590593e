"""A whole run without Ray: it learns, keeps the staleness bound, closes its ledger, and resumes where it stopped."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunFile = Callable[..., Path]
pytestmark = pytest.mark.timeout(400)  # a busy machine takes several times as long


def relax(*arguments: object, cwd: Path, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    """Runs the command line in `cwd`."""
    command = [sys.executable, "-m", "relax.cli.main", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ.copy()
    )


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_run_learns_within_the_bound_and_resumes(run_file: RunFile, tmp_path: Path, max_staleness: int) -> None:
    path, run_dir = run_file(), tmp_path / "runs" / "letters"
    override = f"rollout.max_staleness={max_staleness}"
    done = relax("train", path, override, "train.num_steps=60", "train.checkpoint.every=20", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert all(row["age/max"] <= max_staleness for row in rows)
    assert all(row["samples"] == 32 for row in rows)
    early, late = (sum(row["reward/mean"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert late > early + 0.1, "a learnable reward rises"
    assert (run_dir / "hf" / "model.safetensors").is_file()
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        fates = dict(ledger.execute("select fate, count(*) from issues group by fate"))
    assert fates["trained"] == 60 * 8

    again = relax("train", "--resume", run_dir, "train.num_steps=63", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, 64))
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        trained = ledger.execute("select count(*), count(distinct issue) from issues where fate = 'trained'").fetchone()
    assert trained == (63 * 8, 63 * 8)


@pytest.mark.parametrize("overrides", [["algorithm.kl.coef=0.01"], ["algorithm.old_logprobs=recompute"]])
def test_reference_and_actor_fwd_take_part(run_file: RunFile, tmp_path: Path, overrides: list[str]) -> None:
    done = relax("train", run_file(), *overrides, "train.num_steps=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "runs" / "letters")
    assert len(rows) == 3
    if "kl" in overrides[0]:
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-4)
        assert rows[-1]["kl"] > 0
    else:
        assert rows[0]["ratio/mean"] == pytest.approx(1, abs=1e-3)


def test_a_finished_run_is_not_overwritten_by_accident(run_file: RunFile, tmp_path: Path) -> None:
    path = run_file()
    assert relax("train", path, "train.num_steps=1", cwd=tmp_path).returncode == 0
    again = relax("train", path, cwd=tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert "--overwrite" in again.stderr
    assert len(metrics(tmp_path / "runs" / "letters")) == 1
    assert relax("train", path, "train.num_steps=2", "--overwrite", cwd=tmp_path).returncode == 0
    assert len(metrics(tmp_path / "runs" / "letters")) == 2


def test_filtering_everything_ends_with_a_reason(run_file: RunFile, tmp_path: Path) -> None:
    (tmp_path / "flat_reward.py").write_text("def always_one(prompt, response, answer, metadata):\n    return 1.0\n")
    done = relax(
        "train", run_file(), "reward.path=flat_reward:always_one", "rollout.filter_zero_signal=true",
        "rollout.max_filtered_in_a_row=20", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "equal rewards within the group" in done.stderr


def test_a_reward_that_always_raises_ends_with_its_error(run_file: RunFile, tmp_path: Path) -> None:
    (tmp_path / "bad_reward.py").write_text("def broken(prompt, response, answer, metadata):\n    return 1 / 0\n")
    done = relax(
        "train",
        run_file(),
        "reward.path=bad_reward:broken",
        "rollout.max_failed_in_a_row=5",
        "eval.num_prompts=1",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "division by zero" in done.stderr
