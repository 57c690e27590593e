import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from relax.config.observe import ObserveConfig
from relax.observe.plot import plot_run, smoothed
from relax.observe.recorder import RunRecorder


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_any_number_of_steps_makes_a_picture(tmp_path, row, num_steps):
    recorder = RunRecorder(tmp_path, ObserveConfig(tensorboard=False))
    recorder.evaluation({"step": 0, "eval/accuracy": 0.2, "eval/accuracy/shape": 0.1}) if num_steps else None
    for step in range(1, num_steps + 1):
        recorder.step(row(step))
    recorder.close()
    path = plot_run(tmp_path)
    assert path == tmp_path / "plot.png"
    image = imread(path)
    assert image.shape[1] > 1200
    assert image.std() > 0.01, "not an empty page"
    assert not list(tmp_path.glob(".plot*"))


def test_a_file_that_is_being_written_missing_values_and_a_partial_config_are_no_hindrance(tmp_path, row):
    rows = [
        row(1, **{"reward/mean": None}),
        {"step": 2},
        row(3, **{"age/count_2": 1, "step_s": 0.0}),
        row(4, **{"reward/mean": -3.5}),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 5, "rew')
    (tmp_path / "config.json").write_text(json.dumps({"run": {"name": "x"}}))
    assert plot_run(tmp_path).stat().st_size > 10_000


@given(st.lists(st.floats(-100, 100), max_size=80))
def test_smoothing_keeps_length_and_range(values):
    smooth = smoothed(values)
    assert len(smooth) == len(values)
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for value in smooth)


def test_smoothing_leaves_a_straight_line_straight_inside():
    assert smoothed([1.0, 2.0, 3.0, 4.0])[1:3] == [2.0, 3.0]
