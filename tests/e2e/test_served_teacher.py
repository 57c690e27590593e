"""A run with its teacher behind a server: one that is away for some steps, and one that is gone for good."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_teacher import TeacherServer

from relax.config import RunConfig, load_config
from relax.control.controller import Controller
from relax.control.inprocess import InProcessRuntime
from relax.errors import RoleError
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder

MODES = {
    "colocate": ["resources.mode=colocate", "rollout.max_staleness=0"],
    "fully_async": ["resources.mode=fully_async", "rollout.max_staleness=2"],
}
SETTINGS = ["train.num_steps=6", "train.checkpoint.every=0", "observe.progress=false", "observe.tensorboard=false"]
SETTINGS += ["eval.num_prompts=1", "teacher.server.retries=0"]
STEP = 32  # samples
pytestmark = pytest.mark.timeout(400)  # a busy machine takes several times as long


@pytest.fixture
def server(tiny_model: Path) -> Iterator[TeacherServer]:
    with TeacherServer(tiny_model) as server:
        yield server


@pytest.fixture
def configure(
    run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: TeacherServer
) -> Callable[..., RunConfig]:
    monkeypatch.chdir(tmp_path)  # where the reward is found
    path = run_file()
    return lambda *overrides: load_config(path, [f"teacher.server.url={server.url}", *SETTINGS, *overrides])


def run(config: RunConfig) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    run_dir = Path(config.run.dir) / config.run.name
    run_dir.mkdir(parents=True)
    recorder = RunRecorder(run_dir, config.observe)
    controller = Controller(config, run_dir, InProcessRuntime(config), recorder, Progress(config), 0)
    try:
        asyncio.run(asyncio.wait_for(controller.run(None), 300))
    finally:
        recorder.close()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ["opd", "opd_full"])
def test_a_run_goes_on_without_what_an_absent_teacher_did_not_say(
    configure: Callable[..., RunConfig], server: TeacherServer, algorithm: str, mode: str
) -> None:
    """Away for more than a step: one step has nothing to learn from, those beside it less."""
    first = 1 + STEP + STEP // 2  # after the one at the start
    away = range(first, first + 2 * STEP)
    server.fault = lambda number: "gone" if number in away else None
    config = configure(*MODES[mode], f"algorithm.type={algorithm}")
    rows = run(config)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["samples"] == STEP for row in rows)
    failed = [row["teacher/failed_rows"] for row in rows]
    assert sum(failed) == 2 * STEP
    assert failed[0] == failed[-1] == 0
    assert all(row["skipped"] == 0 and (row["grad_norm"] > 0) == (row["tokens/trained"] > 0) for row in rows)
    assert all(row["loss"] == row["loss"] for row in rows if "loss" in row), "no NaN"
    assert any("teacher/latency_s" in row for row in rows)
    assert rows[-1]["restarts/total"] == 0
    with sqlite3.connect(Path(config.run.dir) / config.run.name / "ledger.sqlite") as ledger:
        trained = ledger.execute("select count(*), count(distinct issue) from issues where fate = 'trained'").fetchone()
    assert trained == (6 * 8, 6 * 8)


@pytest.mark.parametrize("mode", MODES)
def test_a_teacher_that_stays_away_ends_the_run_with_the_first_error(
    configure: Callable[..., RunConfig], server: TeacherServer, mode: str
) -> None:
    server.fault = lambda number: "gone" if number > STEP else None
    config = configure(*MODES[mode], "algorithm.type=opd", "teacher.server.max_failed_in_a_row=40")
    with pytest.raises(RoleError, match=r"no answer about 4\d samples in a row \(teacher.server.max_failed_in_a_row\)"):
        run(config)
