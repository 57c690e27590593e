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


def test_totals_of_other_roles_become_amounts_as_well() -> None:
    rows = StepRow()
    rows.begin(0.0)
    rows.totals({"role": "genrm", "totals": {"genrm/requests": 5}})
    rows.rollout({"counts": {"groups": 2}, "waited_s": 0.5})
    first = rows.finish({"step": 1}, 1.0)
    rows.totals({"role": "genrm", "totals": {"genrm/requests": 8}})
    rows.totals({"role": "genrm", "totals": {"genrm/requests": 1}})  # it began again
    second = rows.finish({"step": 2}, 2.0)
    assert (first["genrm/requests"], second["genrm/requests"], second["groups"]) == (5, 4, 0)
    rows.rewind()
    assert rows.finish({"step": 2}, 3.0)["genrm/requests"] == 0


def test_a_step_before_any_report_has_the_promised_keys() -> None:
    rows = StepRow()
    rows.begin(0.0)
    row = rows.finish({"step": 1}, 1.0)
    assert row["tokens/generated"] == 0
    assert row["wait/rollout_s"] == 0.0


def test_a_rollout_that_began_again_loses_nothing_and_gives_no_negative_amounts() -> None:
    rows = StepRow()
    rows.begin(0.0)
    rows.rollout({"counts": {"tokens/generated": 100, "groups/failed": 1}, "waited_s": 2.0})
    rows.finish({"step": 1}, 1.0)
    rows.rollout({"counts": {"tokens/generated": 130, "groups/failed": 1}, "waited_s": 3.0})
    assert rows.rollout({"counts": {"tokens/generated": 20}, "waited_s": 0.5}), "it is at work again"
    second = rows.finish({"step": 2}, 2.0)
    assert (second["tokens/generated"], second["wait/rollout_s"], second["groups/failed"]) == (50, 1.5, 0)
    rows.rollout({"counts": {"tokens/generated": 25}, "waited_s": 0.5})
    third = rows.finish({"step": 3}, 3.0)
    assert (third["tokens/generated"], third["wait/rollout_s"]) == (5, 0.0)


def test_what_was_done_for_lost_steps_is_in_no_row() -> None:
    rows = StepRow()
    rows.begin(0.0)
    rows.publication({"publish/bytes": 7})
    rows.rollout({"counts": {"tokens/generated": 100}, "waited_s": 0.0})
    rows.rewind()
    rows.rollout({"counts": {"tokens/generated": 110}, "waited_s": 0.0})
    row = rows.finish({"step": 1}, 1.0)
    assert row["tokens/generated"] == 10
    assert "publish/bytes" not in row
