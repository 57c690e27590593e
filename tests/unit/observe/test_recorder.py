import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax.config.observe import ObserveConfig
from relax.errors import ConfigError
from relax.observe.jsonl import read_rows
from relax.observe.recorder import RunRecorder
from relax.observe.run_folder import RunFolder
from relax.observe.samples import best_and_worst, read_samples, sampled_steps

QUIET = ObserveConfig(tensorboard=False)


def test_steps_events_samples_and_evaluations_come_back(tmp_path, row):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.evaluation({"step": 0, "eval/accuracy": 0.1})
    for step in (1, 2):
        recorder.step(row(step))
    recorder.event({"kind": "checkpoint", "step": 2})
    recorder.samples(2, [{"prompt": "1+1", "reward": 1.0}])
    recorder.samples(2, [{"prompt": "añb", "reward": 0.0}])
    recorder.close()
    folder = RunFolder(tmp_path)
    assert folder.metrics() == [row(1), row(2)]
    assert folder.evaluations() == [{"step": 0, "eval/accuracy": 0.1}]
    (event,) = folder.events()
    assert (event["kind"], event["step"]) == ("checkpoint", 2)
    assert event["time"] > 1e9
    assert [sample["prompt"] for sample in read_samples(tmp_path)] == ["1+1", "añb"]
    assert "añb" in (tmp_path / "samples" / "step_000002.jsonl").read_text("utf-8"), "people read this"


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path, row):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.step(row(1))
    assert len(RunFolder(tmp_path).metrics()) == 1
    recorder.close()


def test_resuming_cuts_off_what_came_later_and_only_that(tmp_path, row):
    recorder = RunRecorder(tmp_path, QUIET)
    for step in range(5):
        recorder.evaluation({"step": step, "eval/accuracy": 0.1})
        if step:
            recorder.step(row(step))
            recorder.samples(step, [{"reward": step}])
    recorder.event({"kind": "warning", "text": "kept"})
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    recorder = RunRecorder(tmp_path, QUIET, resume_step=2)
    recorder.step(row(3, **{"reward/mean": 9.0}))
    recorder.evaluation({"step": 2, "eval/accuracy": 0.7})
    recorder.close()
    folder = RunFolder(tmp_path)
    assert folder.metrics() == [row(1), row(2), row(3, **{"reward/mean": 9.0})]
    assert [(e["step"], e["eval/accuracy"]) for e in folder.evaluations()] == [(0, 0.1), (1, 0.1), (2, 0.7)]
    assert sampled_steps(tmp_path) == [1, 2]
    assert [event["text"] for event in folder.events()] == ["kept"]


def test_a_new_run_in_an_old_folder_starts_empty(tmp_path, row):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.step(row(1))
    recorder.evaluation({"step": 0})
    recorder.close()
    RunRecorder(tmp_path, QUIET, resume_step=0).close()
    assert (RunFolder(tmp_path).metrics(), RunFolder(tmp_path).evaluations()) == ([], [])


def test_values_that_are_not_finite_are_null_counted_and_told_once(tmp_path, row, caplog):
    recorder = RunRecorder(tmp_path, QUIET)
    with caplog.at_level(logging.WARNING):
        recorder.step(row(1, loss=float("nan"), kl=float("inf")))
        recorder.step(row(2, loss=float("nan")))
    recorder.close()
    assert [r["loss"] for r in RunFolder(tmp_path).metrics()] == [None, None]
    assert dict(recorder.non_finite) == {"loss": 2, "kl": 1}
    assert len([record for record in caplog.records if "loss = nan at step 1" in record.getMessage()]) == 1
    assert len(RunFolder(tmp_path).events()) == 2


class BrokenSink:
    calls = 0

    def write(self, step, metrics):
        self.calls += 1
        raise RuntimeError("no network")

    def close(self):
        raise RuntimeError("still none")


def test_a_sink_that_fails_is_told_once_and_left_out(tmp_path, row, caplog):
    recorder, sink = RunRecorder(tmp_path, QUIET), BrokenSink()
    recorder.add_sink("broken", sink)
    with caplog.at_level(logging.WARNING):
        recorder.step(row(1))
        recorder.step(row(2))
        recorder.close()
    assert sink.calls == 1
    assert [r.getMessage() for r in caplog.records].count(
        f"broken of {tmp_path} cannot be recorded: RuntimeError: no network"
    ) == 1
    assert len(RunFolder(tmp_path).metrics()) == 2


def test_a_full_disk_does_not_take_down_the_run(tmp_path, row, monkeypatch, caplog):
    recorder = RunRecorder(tmp_path, QUIET)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    recorder.step(row(1))
    recorder.event({"kind": "x"})
    monkeypatch.undo()
    recorder.step(row(2))
    recorder.close()
    assert RunFolder(tmp_path).metrics() == [row(2)]
    assert "metrics.jsonl" in caplog.text
    assert "No space left" in caplog.text


def test_tensorboard_reads_the_steps_and_forgets_those_before_a_resume(tmp_path, row, monkeypatch):
    seconds = iter(range(2**30, 2**31))  # files are read in the order of the seconds in their names
    clock = SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)
    recorder = RunRecorder(tmp_path, ObserveConfig())
    for step in (1, 2, 3):
        recorder.step(row(step, loss=float("nan"), text="words"))
    recorder.close()
    recorder = RunRecorder(tmp_path, ObserveConfig(), resume_step=2)
    recorder.step(row(3, **{"reward/mean": 0.9}))
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    values = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert values == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert not {"loss", "text", "step"} & set(events.Tags()["scalars"])


def test_stats_are_kept_for_status(tmp_path):
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.stats({"waits": [], "bytes": {"held": 3}})
    recorder.close()
    assert RunFolder(tmp_path).stats()["bytes"] == {"held": 3}


def test_the_best_and_the_worst_sample_come_first_for_people():
    samples = [{"reward": 0.5}, {"reward": None}, {"reward": 1.0}, {"reward": 0.0}]
    assert list(best_and_worst(samples)) == [{"reward": 1.0}, {"reward": 0.0}]
    assert list(best_and_worst([{"reward": None}])) == []


def test_samples_that_are_not_there_are_named_with_those_that_are(tmp_path):
    with pytest.raises(ConfigError, match="has no samples"):
        read_samples(tmp_path)
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.samples(3, [{"reward": 1}])
    recorder.close()
    with pytest.raises(ConfigError, match="no samples of step 9; there are some of steps 3 to 3"):
        read_samples(tmp_path, 9)


def test_lines_are_whole_when_the_writer_is_killed(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from relax.observe.jsonl import JsonLines\n"
        "f = JsonLines(Path(sys.argv[1])); [f.append({'step': i}) for i in range(100)]; os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.jsonl")], check=False)
    assert len(read_rows(tmp_path / "m.jsonl")) == 100


def test_observing_loads_neither_torch_nor_ray():
    code = (
        "import sys, json; import relax.observe.recorder, relax.observe.progress, relax.observe.plot, relax.cli.status\n"
        "import relax.weights.publisher, relax.weights.follower\n"
        "sys.stdout.write(json.dumps(sorted({'torch', 'ray', 'transformers', 'tensorflow', 'matplotlib'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_a_rewind_cuts_off_what_was_recorded_of_later_steps_and_goes_on(tmp_path):
    recorder = RunRecorder(tmp_path, ObserveConfig())
    recorder.evaluation({"step": 0, "eval/accuracy": 0.1})
    for step in (1, 2, 3):
        recorder.step({"step": step, "loss": 1.0})
        recorder.samples(step, [{"prompt": "p"}])
    recorder.evaluation({"step": 3, "eval/accuracy": 0.3})
    recorder.event({"kind": "checkpoint", "step": 1})
    recorder.rewind(1)
    recorder.step({"step": 2, "loss": 0.5})
    recorder.close()
    run = RunFolder(tmp_path)
    assert [(row["step"], row["loss"]) for row in run.metrics()] == [(1, 1.0), (2, 0.5)]
    assert [row["step"] for row in run.evaluations()] == [0]
    assert len(run.events()) == 1, "events stay"
    assert sorted(file.name for file in (tmp_path / "samples").iterdir()) == ["step_000001.jsonl"]


def test_a_sink_that_was_added_survives_a_rewind(tmp_path):
    class Sink:
        def __init__(self):
            self.steps, self.closed = [], 0

        def write(self, step, metrics):
            self.steps.append(step)

        def close(self):
            self.closed += 1

    recorder, sink = RunRecorder(tmp_path, ObserveConfig(tensorboard=False)), Sink()
    recorder.add_sink("mine", sink)
    recorder.step({"step": 1})
    recorder.rewind(0)
    recorder.step({"step": 1})
    assert (sink.steps, sink.closed) == ([1, 1], 0)
    recorder.close()
    assert sink.closed == 1
