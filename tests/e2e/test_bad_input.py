"""What a user with bad luck meets: the message says what is right, nothing is lost, and the folder can still be continued."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunFile = Callable[..., Path]


def relax(*arguments: object, cwd: Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "relax.cli.main", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ.copy()
    )


def state(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "state.json").read_text())


@pytest.mark.slow
def test_a_refused_resume_leaves_the_run_as_it_was(run_file: RunFile, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "letters"
    assert relax("train", run_file(), "train.num_steps=3", cwd=tmp_path).returncode == 0
    before = (run_dir / "config.json").read_bytes()
    for override, named in (
        ("rollout.prompts_per_step=2", "rollout.prompts_per_step = 8"),
        ("train.backend.device=zzz", "'zzz'"),
    ):
        refused = relax("train", "--resume", run_dir, "train.num_steps=5", override, cwd=tmp_path)
        assert refused.returncode == 2
        assert named in refused.stderr
        assert "Traceback" not in refused.stderr
        assert (run_dir / "config.json").read_bytes() == before
        assert (state(run_dir)["state"], state(run_dir)["step"]) == ("finished", 3)
    again = relax("train", "--resume", run_dir, "train.num_steps=4", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((run_dir / "config.json").read_text())["train"]["num_steps"] == 4
    nothing = relax("train", "--resume", run_dir, cwd=tmp_path)
    assert nothing.returncode == 0
    assert "is finished: step 4" in nothing.stdout
    assert state(run_dir) | {"state": "finished", "step": 4} == state(run_dir)


@pytest.mark.slow
def test_a_stopped_run_says_its_step_and_whether_it_can_be_continued(run_file: RunFile, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "letters"
    command = [sys.executable, "-m", "relax.cli.main", "train", str(run_file()), "train.num_steps=100000"]
    with subprocess.Popen([*command, "train.checkpoint.every=0"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 60
        metrics = run_dir / "metrics.jsonl"
        while time.monotonic() < deadline and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, text = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "no checkpoint was saved yet" in text
    assert state(run_dir)["state"] == "stopped"
    assert state(run_dir)["step"] >= 3


@pytest.mark.slow
def test_a_failed_role_is_one_line_for_the_user_and_a_traceback_in_the_log(run_file: RunFile, tmp_path: Path) -> None:
    path = run_file()
    (tmp_path / "broken_reward.py").write_text("def f(prompt, response, answer, metadata):\n    return 'good'\n")
    run = relax("train", path, "reward.path=broken_reward:f", "rollout.max_failed_in_a_row=2", cwd=tmp_path)
    assert run.returncode == 1
    assert "error: rollout: " in run.stderr
    assert "groups failed one after another" in run.stderr
    assert "must be a number, and is str: 'good'" in run.stderr
    assert "Traceback" not in run.stderr
    assert "Traceback" in (tmp_path / "runs/letters/log/run.log").read_text()
