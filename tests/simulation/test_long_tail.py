"""Answers that take very different times: real roles and a real queue gain from asynchrony what there is to gain."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fakes import FakeRewards

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "long_tail.py"


@pytest.fixture
def long_tail(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, in this process."""
    spec = importlib.util.spec_from_file_location("long_tail", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "long_tail", module)  # where its dataclasses look for their own module
    monkeypatch.setattr("relax.roles.rollout.RewardPool", FakeRewards)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)  # a busy machine takes several times as long
def test_async_hides_the_long_tail(long_tail: ModuleType, tmp_path: Path) -> None:
    """A loose bound, since the machine is shared: twice as quick is possible, and what the benchmark finds on a quiet one."""
    work = long_tail.Work(prompts=8, group=4, steps=8, step_s=0.1, longest_s=0.1, sigma=1.0, budget_s=0.2)
    (line,) = long_tail.compare(work, [("fully_async", 1)], 1, tmp_path, ["equal phases"])
    assert line["equal phases"] >= 1.4
    assert line["age_max"] <= 1
