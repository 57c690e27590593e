"""The live display of a run; without a terminal, one line a step."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relax.config.run import RunConfig

_BLOCKS = "▁▂▃▄▅▆▇█"
_HISTORY = 48
_SILENT_STEPS = 5
_NOTES = 3
_NOTE_SHOWN_S = 60.0
_REFRESH_PER_S = 4
_SHOWN_WAIT_S = 0.5
# Waits that are the normal state of those who follow along; they say nothing about who holds up whom.
_IDLE_CALLS = ("next_manifest", "wait_acknowledged", "events")


def sparkline(values: Sequence[float], width: int = _HISTORY) -> str:
    """The last values as block characters, averaged down to at most `width`, scaled to their own range."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    spread = high - low
    return "".join(_BLOCKS[round((value - low) / spread * (len(_BLOCKS) - 1)) if spread else 0] for value in means)


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`, `0:07`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def shown_waits(stats: Mapping[str, Any], longer_than_s: float = _SHOWN_WAIT_S) -> list[str]:
    """Who waits for what now, from the transfer queue's statistics, longest first."""
    waits = [
        wait
        for wait in stats.get("waits", ())
        if wait["since_s"] >= longer_than_s and not str(wait["call"]).startswith(_IDLE_CALLS)
    ]
    waits.sort(key=lambda wait: -float(wait["since_s"]))
    return [f"{wait['who'] or wait['call']} waits for {wait['reason']} ({wait['since_s']:.1f} s)" for wait in waits]


def without_weights(stats: Mapping[str, Any]) -> dict[str, str]:
    """Receivers of weights that hold none, from the same statistics, each with the reason in words."""
    versions = stats.get("versions", {})
    reasons = {wait["who"]: f"waits for {wait['reason']}" for wait in stats.get("waits", ())} | versions.get("rejections", {})
    held = sorted(versions.get("acknowledged", {}).items())
    return {name: reasons.get(name, "takes them in") for name, version in held if version is None}


class Progress:
    """Shows how a run goes. Use as a context manager; the calls do nothing before and are safe after it.

    With `observe.progress = false` only notes are shown. `console`: where to; by default the standard error stream, so that a
    run's result can be piped.
    """

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self._config = config
        self._console = console or Console(stderr=True, highlight=False)
        self._is_live = config.observe.progress and self._console.is_terminal
        self._live: Live | None = None
        self._started = time.monotonic()
        self._row: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._step_s: deque[float] = deque(maxlen=20)
        self._evaluations: list[tuple[int, float]] = []
        self._stats: Mapping[str, Any] = {}
        self._notes: deque[tuple[float, str]] = deque(maxlen=_NOTES)
        self._num_silent = 0  # steps in a row in which no group had a signal

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        if self._is_live:
            self._live = Live(
                console=self._console, get_renderable=self.render, refresh_per_second=_REFRESH_PER_S, transient=False
            )
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)
            self._live = None

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Takes the row of a finished step."""
        self._row = dict(metrics)
        if (reward := _number(metrics, "reward/mean")) is not None:
            self._rewards.append(reward)
        if (step_s := _number(metrics, "step_s")) is not None:
            self._step_s.append(step_s)
        if self._config.observe.progress and not self._is_live:
            self._console.print(self._line(), soft_wrap=True)
        self._look_for_signal(metrics)

    def _look_for_signal(self, metrics: Mapping[str, Any]) -> None:
        """Says once when nothing is learned for a while: a run whose rewards never differ looks like one that is done."""
        num_equal, num_groups = metrics.get("reward/zero_signal_groups"), self._config.rollout.prompts_per_step
        is_silent = self._config.algorithm.compares_members and num_equal == num_groups
        self._num_silent = self._num_silent + 1 if is_silent else 0
        if self._num_silent == _SILENT_STEPS:
            self.note(
                f"{_SILENT_STEPS} steps in a row in which the rewards of every group were equal (mean "
                f"{metrics['reward/mean']:.3f}): nothing is learned from them. The task is too easy or too hard for the "
                "policy, or the reward does not tell its responses apart"
            )

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of an evaluation."""
        if (accuracy := _number(metrics, "eval/accuracy")) is not None:
            step = int(metrics["step"])
            self._evaluations.append((step, accuracy))
            if self._config.observe.progress and not self._is_live:
                self._console.print(f"held-out accuracy after step {step}: {accuracy:.3f}", soft_wrap=True)

    def stats(self, stats: Mapping[str, Any]) -> None:
        """Takes the transfer queue's statistics: who waits for whom, versions by receiver."""
        self._stats = stats

    def note(self, text: str) -> None:
        """Shows a line that is not about one step: what is being done, a warning. In the live display for a while."""
        self._notes.append((time.monotonic(), text))
        if not self._is_live:
            self._console.print(text, soft_wrap=True, markup=False, emoji=False)  # a row is "shapes:question:7"

    # -- what is shown ------------------------------------------------------------------------------------------------
    def render(self) -> RenderableType:
        """The whole display as it stands."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, width=9)
        grid.add_column(overflow="fold")
        for name, value in self._rows():
            grid.add_row(name, value)
        run = self._config.run
        title = Text.assemble((run.name, "bold"), f" · {self._config.algorithm.type} · {self._config.model.path}")
        parts: list[RenderableType] = [self._bar(), grid]
        since = time.monotonic() - _NOTE_SHOWN_S
        notes = [text for when, text in list(self._notes) if when >= since]
        parts += [Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in notes]
        return Panel(Group(*parts), title=title, title_align="left", border_style="blue", padding=(0, 1))

    def _bar(self) -> RenderableType:
        step, total = int(self._row.get("step", 0)), self._config.train.num_steps
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        clock = f"{duration(time.monotonic() - self._started)} · {self._eta(step, total)}"
        bar.add_row(Text(f"step {step}/{total}", style="bold"), ProgressBar(total=total, completed=step), clock)
        return bar

    def _eta(self, step: int, total: int) -> str:
        if step >= total:
            return "done"
        if not self._step_s:
            return "starting"
        return f"{duration((total - step) * sum(self._step_s) / len(self._step_s))} left"

    def _rows(self) -> list[tuple[str, RenderableType]]:
        row, rows = self._row, list[tuple[str, RenderableType]]()
        if (reward := _number(row, "reward/mean")) is not None:
            rows.append(("reward", Text.assemble((f"{reward:.3f}", "bold green"), "  ", (sparkline(self._rewards), "green"))))
        if self._evaluations:
            first, last = self._evaluations[0], self._evaluations[-1]
            change = f"{first[1]:.3f} → " if len(self._evaluations) > 1 else ""
            rows.append(("held-out", Text.assemble(change, (f"{last[1]:.3f}", "bold green"), f"  after step {last[0]}")))
        if row:
            rows.append(("response", _text(row, "response/length_mean", "{:.1f} tokens") + self._truncated()))
            rows.append(("age", f"{self._age()}, {self._config.rollout.max_staleness} allowed"))
            rows.append(("speed", f"{self._speed()} · {_text(row, 'step_s', '{:.2f} s a step')}"))
            rows.append(("waiting", self._shares()))
        rows += [("", Text(wait, style="dim")) for wait in shown_waits(self._stats)[:3]]
        if versions := self._stats.get("versions", {}).get("acknowledged"):
            held = ", ".join(f"{name} {'-' if version is None else version}" for name, version in sorted(versions.items()))
            rows.append(("weights", f"version {self._stats['versions'].get('newest')}; {held}"))
        return rows

    def _truncated(self) -> str:
        share = _number(self._row, "response/truncated_fraction") or 0.0
        return f" · {share:.0%} cut off" if share else ""

    def _age(self) -> str:
        return f"{_text(self._row, 'age/mean', 'mean {:.2f}')} · {_text(self._row, 'age/max', 'max {:.0f}')}"

    def _speed(self) -> str:
        return _text(self._row, "tokens_per_s", "{:,.0f} tokens/s")

    def _shares(self) -> str:
        """What share of the last step the trainer and the rollout waited."""
        step_s = _number(self._row, "step_s")
        shares = []
        for role in ("actor", "rollout"):
            waited = _number(self._row, f"wait/{role}_s")
            if step_s and waited is not None:
                shares.append(f"{role} {min(1.0, max(0.0, waited / step_s)):.0%}")
        return " · ".join(shares) or "-"

    def _line(self) -> str:
        step, total = int(self._row["step"]), self._config.train.num_steps
        return (
            f"step {step}/{total}  reward {_text(self._row, 'reward/mean', '{:.3f}')}  "
            f"length {_text(self._row, 'response/length_mean', '{:.1f}')}  age {self._age()}  {self._speed()}  "
            f"waiting {self._shares()}  {self._eta(step, total)}"
        )


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None


def _text(row: Mapping[str, Any], name: str, form: str) -> str:
    value = _number(row, name)
    return "-" if value is None else form.format(value)
