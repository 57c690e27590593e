import io
import time

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from relax.observe.progress import Progress, duration, shown_waits, sparkline

STATS = {
    "waits": [
        {"who": "rollout", "call": "admit", "reason": "version 3 to be acknowledged", "since_s": 2.25},
        {"who": "", "call": "claim by actor", "reason": "8 groups", "since_s": 4.0},
        {"who": "engine-0", "call": "next_manifest", "reason": "a policy version above 3", "since_s": 90.0},
        {"who": "actor", "call": "wait_acknowledged 3", "reason": "version 3", "since_s": 90.0},
        {"who": "advantages", "call": "claim", "reason": "rows", "since_s": 0.1},
    ],
    "versions": {"acknowledged": {"engine-0": 3, "actor_fwd": None}, "newest": 3},
}


def shown(config, *, is_terminal, width=110, act):
    out = io.StringIO()
    progress = Progress(config, Console(file=out, force_terminal=is_terminal, width=width, highlight=False))
    with progress:
        act(progress)
    return out.getvalue()


def run_of(row, steps=(1, 2)):
    def act(progress):
        progress.note("starting the roles")
        progress.evaluation({"step": 0, "eval/accuracy": 0.25})
        for step in steps:
            progress.update(row(step))
        progress.stats(STATS)
        progress.evaluation({"step": 2, "eval/accuracy": 0.75})

    return act


def test_without_a_terminal_every_step_is_one_line(config, row):
    lines = shown(config, is_terminal=False, width=40, act=run_of(row)).splitlines()
    assert lines == [
        "starting the roles",
        "held-out accuracy after step 0: 0.250",
        *(
            f"step {s}/4  reward 0.{s}00  length 12.0  age mean 0.50 · max 1  1,234 tokens/s  "
            f"waiting actor 25% · rollout 50%  0:0{(4 - s) * 2} left"
            for s in (1, 2)
        ),
        "held-out accuracy after step 2: 0.750",
    ]


def test_the_live_display_shows_everything_that_matters(config, row):
    text = shown(config, is_terminal=True, act=run_of(row))
    for part in (
        "digits", "grpo", "step 2/4", "0.200", "▁█", "0.250 → ", "0.750", "12.0 tokens", "25% cut off",
        "mean 0.50 · max 1, 1 allowed",
        "1,234 tokens/s", "2.00 s a step", "actor 25% · rollout 50%", "rollout waits for version 3 to be acknowledged (2.2 s)",
        "version 3; actor_fwd -, engine-0 3", "starting the roles",
    ):  # fmt: skip
        assert part in text, part


def test_missing_and_null_metrics_are_shown_as_unknown(config, row):
    def act(progress):
        progress.update({"step": 1, "reward/mean": None, "wait/actor_s": 0.5})

    assert "reward -" in shown(config, is_terminal=False, act=act)
    assert "step 1/4" in shown(config, is_terminal=True, act=act)


def test_progress_can_be_switched_off_but_notes_stay(config, row):
    quiet = config.model_copy(update={"observe": config.observe.model_copy(update={"progress": False})})
    assert shown(quiet, is_terminal=True, act=run_of(row)) == "starting the roles\n"


def test_calls_outside_the_context_are_safe(config, row):
    progress = Progress(config, Console(file=io.StringIO(), force_terminal=True))
    run_of(row)(progress)
    with progress:
        pass
    progress.update(row(3))
    progress.note("[not markup")


def test_a_note_is_never_taken_for_markup(config):
    for text in ("[bold]x[/nonsense]", "shapes:question:7"):
        assert text in shown(config, is_terminal=False, act=lambda p, text=text: p.note(text))
        assert text in shown(config, is_terminal=True, act=lambda p, text=text: p.note(text))


def test_an_old_note_leaves_the_live_display(config, monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    progress = Progress(config, console)
    progress.note("something happened")
    console.print(progress.render())
    assert "something happened" in console.export_text()
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    console.print(progress.render())
    assert "something happened" not in console.export_text()


def test_waits_are_in_order_and_those_that_only_follow_along_are_left_out():
    assert shown_waits(STATS) == [
        "claim by actor waits for 8 groups (4.0 s)",
        "rollout waits for version 3 to be acknowledged (2.2 s)",
    ]
    assert shown_waits({}) == []


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(1, 60))
def test_a_sparkline_fits_and_its_extremes_are_the_lowest_and_highest_block(values, width):
    line = sparkline(values, width)
    assert len(line) == (0 if not values else -(-len(values) // -(-len(values) // width)))
    assert len(line) <= width
    assert set(line) <= set("▁▂▃▄▅▆▇█")
    if len(set(line)) > 1:
        assert {"▁", "█"} <= set(line)


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (0, 7.4, 123, 3723, -5)] == ["0:00", "0:07", "2:03", "1:02:03", "0:00"]


def test_a_run_whose_rewards_never_differ_is_told_so_once(config, row):
    groups = config.rollout.prompts_per_step

    def act(progress):
        for step in range(1, 12):
            progress.update(row(step, **{"reward/zero_signal_groups": groups if step != 3 else groups - 1}))

    assert (
        shown(config, is_terminal=False, act=act).count("5 steps in a row in which the rewards of every group were equal") == 1
    )
