"""Answers that take very different times: real roles and a real queue gain from asynchrony what there is to gain."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "long_tail.py"


@pytest.mark.timeout(300)  # a busy machine takes several times as long
def test_async_hides_the_long_tail(tmp_path: Path) -> None:
    """A loose bound, since the machine is shared: twice as quick is possible, and what the benchmark finds on a quiet one."""
    out = tmp_path / "lines.json"
    command = [sys.executable, BENCHMARK, "--rounds", "1", "--steps", "8", "--step-s", "0.2", "--prompts", "8", "--group", "4"]
    more = ["--bounds", "1", "--modes", "fully_async", "--plans", "equal phases", "--json", out]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(out.read_text())
    assert line["equal phases"] >= 1.4
    assert line["age_max"] <= 1
