"""Whole runs on real Ray: they end, stop on Ctrl-C, resume, stand beside one another, and leave no process behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from ray_runs import assert_all_gone, family, left_in_memory, rows, state, training, wait_for_step

RunFile = Callable[..., Path]
pytestmark = pytest.mark.timeout(300)


def test_run_ends_and_leaves_nothing_behind(run_file: RunFile, tmp_path: Path) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    left_before = left_in_memory()
    with training(path, cwd=tmp_path) as process:
        wait_for_step(run_dir, 1, process)
        members = family(process.pid)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        assert_all_gone(members)
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert all(row["age/max"] <= 1 for row in rows(run_dir))
    assert "held-out accuracy" in out
    assert state(run_dir) == "finished"
    assert (run_dir / "hf" / "model.safetensors").is_file()
    assert left_in_memory() <= left_before


def test_ctrl_c_stops_in_time_and_resume_goes_on(run_file: RunFile, tmp_path: Path) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    with training(path, "train.num_steps=100000", cwd=tmp_path) as process:
        wait_for_step(run_dir, 4, process)
        members = family(process.pid)
        started = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group hears it
        out, _ = process.communicate(timeout=30)
        assert time.monotonic() - started < 10
        assert process.returncode == 130, out
        assert "--resume" in out
        assert_all_gone(members)
    assert state(run_dir) == "stopped"
    with training("--resume", run_dir, "train.num_steps=6", cwd=tmp_path) as process:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
    steps = [row["step"] for row in rows(run_dir)]
    assert steps == sorted(set(steps)), "no step is recorded twice"
    assert steps[-1] >= 6


def test_without_restarts_a_killed_engine_ends_the_run_with_a_reason(run_file: RunFile, tmp_path: Path) -> None:
    path, run_dir = run_file("ray"), tmp_path / "runs" / "letters"
    with training(path, "train.num_steps=100000", "services.max_restarts=0", cwd=tmp_path) as process:
        wait_for_step(run_dir, 2, process)
        members = family(process.pid)
        engines = [member for member in members if "EngineActor" in " ".join(member.cmdline())]
        assert engines, [member.cmdline() for member in members]
        engines[0].kill()
        out, _ = process.communicate(timeout=90)
        assert process.returncode == 1, out
        assert "engine-0" in out
        assert "--resume" in out
        assert_all_gone(members)
    assert state(run_dir) == "failed"


@pytest.mark.slow
def test_two_runs_at_once(run_file: RunFile, tmp_path: Path) -> None:
    with training(run_file("ray", "one"), cwd=tmp_path) as one, training(run_file("ray", "two"), cwd=tmp_path) as two:
        assert one.communicate(timeout=200)[1] is None
        two.communicate(timeout=200)
        assert (one.returncode, two.returncode) == (0, 0)
    assert len(rows(tmp_path / "runs" / "one")) == len(rows(tmp_path / "runs" / "two")) == 6


def test_every_role_answers_over_http_and_a_taken_port_is_named(run_file: RunFile, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with training(run_file("ray"), f"services.http_port={port}", cwd=tmp_path) as process:
            out, _ = process.communicate(timeout=60)
        assert process.returncode != 0
        assert str(port) in out
        assert "port" in out
    with training(
        run_file("ray"), f"services.http_port={port}", "train.num_steps=100000", "algorithm.kl.coef=0.01",
        "algorithm.old_logprobs=recompute", "--overwrite", cwd=tmp_path,
    ) as process:  # fmt: skip
        wait_for_step(tmp_path / "runs" / "letters", 1, process)
        for role in ("actor", "rollout", "advantages", "reference", "actor_fwd"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{role}/status", timeout=10) as answer:
                status = json.load(answer)
            assert status["role"] == role
            assert status["running"] is True
            assert status["error"] is None


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_joins_a_cluster_and_leaves_it_running(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER, str(tmp_path / "address")], start_new_session=True, stdin=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "address").exists():
            assert cluster.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        address = (tmp_path / "address").read_text()
        with training(run_file("ray"), f"run.ray_address={address}", cwd=tmp_path) as process:
            out, _ = process.communicate(timeout=90)
            assert process.returncode == 2, out
            assert "RAY_AUTH_MODE=token" in out
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with training(run_file("ray", "joined"), f"run.ray_address={address}", cwd=tmp_path) as process:
            out, _ = process.communicate(timeout=150)
            assert process.returncode == 0, out
        assert len(rows(tmp_path / "runs" / "joined")) == 6
        assert cluster.poll() is None, "the cluster is not ours to stop"
        with training(
            run_file("ray", "again"), f"run.ray_address={address}", "train.num_steps=100000", cwd=tmp_path
        ) as process:
            wait_for_step(tmp_path / "runs" / "again", 1, process)
            ours = ("ServeReplica", "EngineActor", "BusHost")
            members = [one for one in family(cluster.pid) if any(name in " ".join(one.cmdline()) for name in ours)]
            assert len(members) >= 5
            os.kill(process.pid, signal.SIGKILL)
            assert_all_gone(members, within_s=60)
        assert cluster.poll() is None
    finally:
        cluster.communicate("stop\n", timeout=30)


_CLUSTER = """
import os, pathlib, sys
import ray
context = ray.init(address="local", num_cpus=4, include_dashboard=False)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(context.address_info["gcs_address"])
path.with_suffix(".new").rename(path)
sys.stdin.readline()
ray.shutdown()
"""
