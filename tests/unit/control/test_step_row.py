"""The rollout's running totals become amounts for each step: their sum over the steps is the total."""

from relax.control.step_row import StepRow


def test_amounts_add_up_to_the_totals() -> None:
    rows = StepRow()
    rows.begin(100.0)
    assert rows.rollout({"counts": {"tokens/generated": 10}, "waited_s": 0.5})
    first = rows.finish({"step": 1, "loss": 0.1}, 101.0)
    assert rows.rollout({"counts": {"tokens/generated": 25, "groups": 2}, "waited_s": 0.5})
    assert not rows.rollout({"counts": {"tokens/generated": 25, "groups": 2}, "waited_s": 0.9})
    second = rows.finish({"step": 2, "loss": 0.1}, 103.0)
    assert (first["tokens/generated"], second["tokens/generated"]) == (10, 15)
    assert first["wait/rollout_s"] + second["wait/rollout_s"] == 0.9
    assert (first["time_s"], second["time_s"]) == (1.0, 3.0)
    assert second["groups"] == 2


def test_a_step_before_any_report_has_the_promised_keys() -> None:
    rows = StepRow()
    rows.begin(0.0)
    row = rows.finish({"step": 1}, 1.0)
    assert row["tokens/generated"] == 0
    assert row["wait/rollout_s"] == 0.0
