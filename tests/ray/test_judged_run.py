"""Judges on Ray: an engine and the role itself are killed, and the run goes on with every step; HTTP is for all to ask."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from judge_model import judge_settings, train_judge
from ray_runs import assert_all_gone, events, family, rows, training, wait_for_step

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
NUM_STEPS = 30


def ask(url: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_run_outlives_the_death_of_its_judge(
    run_file: Callable[..., Path], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    judge = train_judge(tiny_model, tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_dir = tmp_path / "runs" / "letters"
    faults = '[{kind="kill", target="judge-default-0", step=3}, {kind="kill", target="genrm", step=6}]'
    overrides = [
        *judge_settings(judge),
        f"services.http_port={port}",
        f"train.num_steps={NUM_STEPS}",
        f"faults.events={faults}",
    ]
    with training(run_file("ray"), *overrides, cwd=tmp_path) as process:
        wait_for_step(run_dir, 1, process)
        url = f"http://127.0.0.1:{port}/genrm"
        status, said = ask(f"{url}/generate", {"messages": [{"role": "user", "content": "c"}]})
        assert (status, said["response"]) == (200, "yes")
        status, said = ask(f"{url}/generate", {"messages": [{"role": "user", "content": "c"}], "route": "other"})
        assert (status, "there are the judges default" in said["error"]) == (400, True)
        with urllib.request.urlopen(f"{url}/engines", timeout=30) as answer:
            assert json.load(answer)["judges"]["default"][0]["engine"] == "judge-default-0"
        members = family(process.pid)
        out, _ = process.communicate(timeout=250)
        assert process.returncode == 0, out
        assert_all_gone(members)
    steps = rows(run_dir)
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert {event["role"] for event in events(run_dir, "recovery")} == {"judge-default-0", "genrm"}
    assert sum(row["genrm/requests"] for row in steps) > 0
    assert sum(row.get("outcome/reward_error", 0) for row in steps) < 0.1 * NUM_STEPS * 32, "calls waited for the judge"
