import json
import sqlite3
import time

import pytest

from relax.cli.status import render_status, status_dict
from relax.config.observe import ObserveConfig
from relax.config.run import RunConfig
from relax.errors import ConfigError
from relax.observe.recorder import RunRecorder
from relax.observe.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    """A run that is going on: three steps, a checkpoint, a warning, a wait."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "digits"},
            "model": {"path": "m"},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
            "reward": {"type": "exact"},
            "train": {"num_steps": 10},
        }
    )
    folder = RunFolder(tmp_path / "digits")
    with folder.lock():
        folder.write_config(config)
        folder.set_state("running", 0)
        recorder = RunRecorder(folder.path, ObserveConfig(tensorboard=False))
        recorder.evaluation({"step": 0, "eval/accuracy": 0.25})
        for step in (1, 2, 3):
            recorder.step(
                {
                    "step": step, "time_s": 2.0 * step, "step_s": 2.0, "reward/mean": step / 10, "age/mean": 0.5, "age/max": 1,
                    "response/length_mean": 9.5, "tokens_per_s": 1000.0, "wait/actor_s": 1.0, "wait/rollout_s": 0.2,
                    "age/count_0": 2, "age/count_1": 6,
                }
            )  # fmt: skip
        recorder.event({"kind": "warning", "role": "rollout", "text": "prompt 7 was [too] long"})
        recorder.event({"kind": "fault", "fault": "kill", "target": "actor"})
        cause = "the process of actor died"
        recorder.event({"kind": "recovery", "role": "actor", "cause": cause, "attempt": 1, "down_s": 3.21, "step": 2})
        recorder.event({"kind": "weights", "subscriber": "engine-0", "version": 2, "rejected": "digest disagrees"})
        wait = {"who": "rollout", "call": "admit", "reason": "a place [a]", "since_s": 3.0}
        versions = {"acknowledged": {"engine-0": 3, "engine-1": None}, "rejections": {"engine-1": "rejected version 3: digest"}}
        recorder.stats({"stale": {"dropped": 1, "masked": 3, "surplus": 0}, "waits": [wait], "versions": versions})
        recorder.close()
        (folder.path / "checkpoints" / "step_2").mkdir(parents=True)
        database = sqlite3.connect(folder.path / "ledger.sqlite")
        database.execute("CREATE TABLE issues (issue INTEGER PRIMARY KEY, prompt INTEGER, fate TEXT, reason TEXT)")
        rows = [(1, "trained", ""), (2, "in_flight", ""), (3, "dropped", "too old for step 4"), (3, "in_flight", "")]
        database.executemany("INSERT INTO issues(prompt, fate, reason) VALUES (?, ?, ?)", rows)
        database.commit()
        database.close()
        yield folder


def test_a_running_run_is_shown_with_all_that_matters(run):
    text = render_status(run.path)
    for part in (
        "digits", "running (process", "3 of 10", "0.300", "0.250 (step 0)", "9.5 tokens", "mean 0.50, max 1, 1 allowed",
        "1,000 tokens/s, 2.00 s a step", "actor 50%, rollout 10%", "rollout waits for a place [a] (3.0 s)",
        "versions held: engine-0 3, engine-1 none, rejected version 3: digest",
        "4 issued = 1 trained + 1 dropped + 2 in flight", "1 dropped: too old for step", "step_2",
        "samples so far: 6 of age 0, 18 of age 1", "recoveries (1, 1 faults on purpose)",
        "1 groups dropped, 3 groups trained with their oldest tokens masked",
        "actor ran again after 3.2 s, at step 2: the process of actor died", "warnings (2)", "rollout: prompt 7 was [too] long",
        "engine-0: version 2: digest disagrees",
    ):  # fmt: skip
        assert part in text, f"{part}\n{text}"


def test_the_json_form_holds_the_same(run):
    status = json.loads(json.dumps(status_dict(run.path)))
    assert (status["state"], status["step"], status["num_steps"]) == ("running", 3, 10)
    assert status["metrics"]["reward/mean"] == 0.3
    assert status["ledger"] == {"issued": 4, "dropped": 1, "in_flight": 2, "trained": 1}
    assert status["ledger_faults"] == []
    assert status["ages"] == {"0": 6, "1": 18}
    assert (status["num_recoveries"], status["recoveries"][0]["role"]) == (1, "actor")
    assert status["waits"] == ["rollout waits for a place [a] (3.0 s)"]
    assert status["versions"] == {"engine-0": 3, "engine-1": None}
    assert status["without_weights"] == {"engine-1": "rejected version 3: digest"}
    assert status["checkpoints"] == ["step_2"]
    assert status["num_warnings"] == 2


def test_waits_of_a_run_that_ended_or_of_long_ago_are_not_shown(run, monkeypatch):
    run.set_state("failed", 3, "the reward raised")
    status = status_dict(run.path)
    assert (status["state"], status["waits"], status["versions"], status["pid"]) == ("failed", [], {}, None)
    assert "failed: the reward raised" in render_status(run.path)
    run.set_state("running", 3)
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert status_dict(run.path)["waits"] == []


def test_a_run_without_a_step_yet_is_shown(tmp_path, run):
    young = RunFolder(tmp_path / "young")
    young.path.mkdir()
    (young.path / "config.json").write_text((run.path / "config.json").read_text())
    young.set_state("running", 0)
    text = render_status(young.path)
    assert "0 of 10" in text
    assert "no checkpoint yet" in text
    assert "killed" in text, "nobody holds its folder"


def test_a_folder_that_is_not_a_run_is_a_clear_error(tmp_path, run):
    with pytest.raises(ConfigError, match=r"not a run folder.*these in it are: digits"):
        status_dict(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        render_status(tmp_path / "nowhere")
