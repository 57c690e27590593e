"""Parts of real runs on Ray die by SIGKILL: the runs go on and end, their ledgers close, nothing is left behind."""

import json
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ray_runs import (
    assert_all_gone,
    events,
    family,
    kill_and_wait,
    left_in_memory,
    member,
    rows,
    state,
    training,
    wait_for_step,
)

from relax.observe.ledger_file import LedgerFile

RunFile = Callable[..., Path]
pytestmark = pytest.mark.timeout(400)

REPLICA = "ray::ServeReplica:"
ENGINE, QUEUE = "ray::EngineActor", "ray::BusHost"
SETTINGS = ("train.num_steps=100000", "train.checkpoint.every=5", "eval.num_prompts=2", "services.restart_backoff_s=0.1")


def told(capsys: pytest.CaptureFixture[str], what: str, seconds: float) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  time to resume after {what} was killed: {seconds:.1f} s")


def assert_closes(run_dir: Path, num_steps: int) -> None:
    """The record has every step once, the ledger every place of every step, and every prompt at most once."""
    assert [row["step"] for row in rows(run_dir)] == list(range(1, num_steps + 1))
    assert all(row["age/max"] <= 1 for row in rows(run_dir))
    assert LedgerFile(run_dir).faults() == []
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        steps = dict(ledger.execute("SELECT step, COUNT(*) FROM issues WHERE fate = 'trained' GROUP BY step"))
    ledger.close()
    assert steps == dict.fromkeys(range(num_steps), 8)


def go_on(run_dir: Path, cwd: Path, num_more: int = 3) -> None:
    """Resumes the run until a few steps after what it has, and looks at what it comes to.

    The last checkpoint may be ahead of the record: the actor of a killed controller lives a little longer.
    """
    checkpoints = [int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*[0-9]")]
    num_steps = int(max(rows(run_dir)[-1]["step"], *checkpoints)) + num_more
    with training("--resume", run_dir, f"train.num_steps={num_steps}", cwd=cwd) as process:
        out, _ = process.communicate(timeout=150)
        assert process.returncode == 0, out
    assert state(run_dir) == "finished"
    assert_closes(run_dir, num_steps)


def test_each_part_dies_in_turn_and_the_run_goes_on(
    run_file: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    with training(path, *SETTINGS, cwd=tmp_path) as process:
        wait_for_step(run_dir, 2, process)
        for part in (ENGINE, f"{REPLICA}rollout", f"{REPLICA}advantages", f"{REPLICA}actor"):
            told(capsys, part.removeprefix("ray::"), kill_and_wait(process, run_dir, part))
        members = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 130, out
        assert_all_gone(members)
    assert [event["role"] for event in events(run_dir, "recovery")] == ["engine-0", "rollout", "advantages", "actor"]
    assert all(event["down_s"] < 60 for event in events(run_dir, "recovery"))
    assert len(events(run_dir, "rewind")) == 1
    assert "rollout runs again after" in out
    assert rows(run_dir)[-1]["restarts/total"] == 4
    assert LedgerFile(run_dir).faults() == []


def test_a_killed_controller_leaves_nothing_and_the_resumed_run_closes_its_ledger(
    run_file: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    left_before = left_in_memory()
    with training(path, *SETTINGS, cwd=tmp_path) as process:
        wait_for_step(run_dir, 6, process)
        # Ray's own agents look for their dead masters for another minute, and then end by themselves
        members = [one for one in family(process.pid) if not one.name().endswith("Agent")]
        os.kill(process.pid, signal.SIGKILL)
        assert_all_gone(members, within_s=20)
    started = time.monotonic()
    go_on(run_dir, tmp_path)
    told(capsys, "the controller (a few steps and the end included)", time.monotonic() - started)
    assert left_in_memory() <= left_before


def test_a_silent_role_is_replaced_and_the_second_ctrl_c_ends_every_process_at_once(run_file: RunFile, tmp_path: Path) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    with training(path, *SETTINGS, "services.answer_timeout_s=6", cwd=tmp_path) as process:
        wait_for_step(run_dir, 2, process)
        os.kill(member(process, f"{REPLICA}advantages").pid, signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while not (found := [event for event in events(run_dir, "recovery") if event["role"] == "advantages"]):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "services.answer_timeout_s = 6" in found[0]["cause"]
        wait_for_step(run_dir, len(rows(run_dir)) + 2, process)
        members = family(process.pid)
        # a role that does not answer cannot be stopped in order, so the first Ctrl-C alone would take its time
        os.kill(member(process, f"{REPLICA}actor").pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        started = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130
        assert time.monotonic() - started < 6, "in order, it would have waited 8 s for the actor to stop"
        assert_all_gone(members)


@pytest.mark.slow
def test_the_queue_dies_and_everything_is_started_again(
    run_file: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    with training(path, *SETTINGS, cwd=tmp_path) as process:
        wait_for_step(run_dir, 6, process)
        told(capsys, "the queue", kill_and_wait(process, run_dir, QUEUE))
        members = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
        assert_all_gone(members)
    assert [event["role"] for event in events(run_dir, "recovery")] == ["queue"]
    go_on(run_dir, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_ray_itself_dies_and_is_started_again(
    run_file: RunFile, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    with training(path, *SETTINGS, cwd=tmp_path) as process:
        wait_for_step(run_dir, 6, process)
        (found,) = [one for one in family(process.pid) if one.name() == part]
        started = time.monotonic()
        found.kill()
        while not events(run_dir, "recovery"):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() - started < 90
            time.sleep(0.1)
        told(capsys, part, time.monotonic() - started)
        members = family(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
        assert_all_gone(members)
    assert events(run_dir, "recovery")[0]["role"] == "ray"
    go_on(run_dir, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random(run_file: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    settings = ("faults.random_kills=20", "services.max_restarts=40", "services.restart_backoff_s=0.1")
    steps = ("train.num_steps=200", "train.checkpoint.every=5", "eval.num_prompts=2", "rollout.num_engines=2")
    with training(path, *settings, *steps, cwd=tmp_path) as process:
        out, _ = process.communicate(timeout=1100)
        assert process.returncode == 0, out
    faults, recoveries = events(run_dir, "fault"), events(run_dir, "recovery")
    assert len(faults) == 20
    for event in recoveries:
        told(capsys, event["role"], event["down_s"])
    assert len(recoveries) >= 19, "one of the last may come when the run is complete"
    assert_closes(run_dir, 200)
    assert json.loads((run_dir / "state.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_lost_and_slow_messages_and_refused_publications_change_nothing(run_file: RunFile, tmp_path: Path) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    faults = (
        '{kind="delay", target="advantages", step=2, seconds=0.1, count=20, probability=0.5}',
        '{kind="lose_messages", target="rollout", step=3, count=10, probability=0.05}',
        '{kind="lose_messages", target="actor", step=4, count=5, probability=0.05}',
        '{kind="fail_sync", target="engine-0", step=5, count=2}',
    )
    settings = ("train.num_steps=30", "train.checkpoint.every=5", "eval.num_prompts=2")
    with training(path, *settings, f"faults.events=[{', '.join(faults)}]", cwd=tmp_path) as process:
        out, _ = process.communicate(timeout=350)
        assert process.returncode == 0, out
    assert len(events(run_dir, "fault")) == 4
    assert sum(bool(event.get("rejected")) for event in events(run_dir, "weights")) == 2
    assert_closes(run_dir, 30)
