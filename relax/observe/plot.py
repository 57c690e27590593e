"""The picture of a run: reward and held-out accuracy, response length, ages, and where the time went."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax.observe.jsonl import Row
from relax.observe.run_folder import RunFolder

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _ORANGE, _GREEN, _RED, _VIOLET = "#2563eb", "#ea7317", "#0f9d6b", "#d64550", "#7c5cd6"
_AGES = ("#c7dbff", "#8fb6fb", "#5a8ef0", "#2563eb", "#1c47a8", "#132f70")
_BY_KIND = "eval/accuracy/"
_MOSAIC = [["reward", "reward", "length"], ["reward", "reward", "age"], ["reward", "reward", "time"]]
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": _INK,
    "figure.facecolor": "white",
}


def plot_run(run_dir: Path) -> Path:
    """Draws what is recorded so far into `plot.png` in the run folder, and returns its path."""
    # here, since matplotlib is slow to import and only the end of a run needs it
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    folder = RunFolder(run_dir)
    rows, evaluations, config = folder.metrics(), folder.evaluations(), folder.config()
    with rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.04, wspace=0.04)
        figure = Figure(figsize=(11, 6.6), dpi=150, layout=layout)
        FigureCanvasAgg(figure)
        figure.suptitle(_title(config, rows), x=0.012, ha="left", color=_INK, fontsize=14, fontweight="bold")
        axes: dict[str, Any] = figure.subplot_mosaic(_MOSAIC)
        _reward(axes["reward"], rows, evaluations)
        _length(axes["length"], rows)
        _age(axes["age"], rows, config)
        _time(axes["time"], rows)
        for panel in axes.values():
            _finish(panel, rows, evaluations)
        path = run_dir / "plot.png"
        temporary = run_dir / ".plot.png"
        figure.savefig(temporary, format="png")
        temporary.replace(path)
    return path


def _reward(panel: Any, rows: Sequence[Row], evaluations: Sequence[Row]) -> None:
    panel.set_title("Reward")
    steps, rewards = _series(rows, "reward/mean")
    panel.plot(steps, rewards, color=_BLUE, alpha=0.28, linewidth=1.2)
    panel.plot(steps, smoothed(rewards), color=_BLUE, linewidth=2.4, label="training reward")
    eval_steps, accuracy = _series(evaluations, "eval/accuracy")
    if eval_steps:
        panel.plot(
            eval_steps, accuracy, color=_ORANGE, linewidth=2, marker="o", markersize=6, markeredgecolor="white",
            markeredgewidth=1.2, label="held-out accuracy", zorder=5, clip_on=False,
        )  # fmt: skip
        kinds = sorted({name for row in evaluations for name in row if name.startswith(_BY_KIND)})
        for name, style in zip(kinds, itertools.cycle(("--", ":", "-."))):
            panel.plot(
                *_series(evaluations, name),
                color=_ORANGE,
                alpha=0.7,
                linewidth=1.3,
                linestyle=style,
                label=name.removeprefix(_BY_KIND),
            )
        for index in {0, len(eval_steps) - 1}:
            below = index == 0 and len(accuracy) > 1 and accuracy[1] > accuracy[0]
            panel.annotate(
                f"{accuracy[index]:.2f}", (eval_steps[index], accuracy[index]), xytext=(0, -15 if below else 9),
                textcoords="offset points", ha="center", color=_ORANGE, fontweight="bold", fontsize=10,
            )  # fmt: skip
    values = rewards + accuracy
    if values and min(values) >= 0 and max(values) <= 1:
        panel.set_ylim(0, 1.06)
    panel.set_xlabel("step")
    if values:
        panel.legend(loc="lower right")


def _length(panel: Any, rows: Sequence[Row]) -> None:
    panel.set_title("Response length")
    steps, lengths = _series(rows, "response/length_mean")
    panel.plot(steps, lengths, color=_GREEN, linewidth=1.8)
    if lengths:
        panel.set_ylim(0, max(lengths) * 1.15)
    panel.set_ylabel("tokens")


def _age(panel: Any, rows: Sequence[Row], config: dict[str, Any]) -> None:
    panel.set_title("Age of the samples")
    counted = sorted({int(name.removeprefix("age/count_")) for row in rows for name in row if name.startswith("age/count_")})
    bound = config.get("rollout", {}).get("max_staleness")
    if counted:
        steps = [row["step"] for row in rows]
        shares = []
        for age in counted:
            totals = [sum(row.get(f"age/count_{other}") or 0 for other in counted) for row in rows]
            counts = [row.get(f"age/count_{age}") or 0 for row in rows]
            shares.append([100 * count / total if total else 0.0 for count, total in zip(counts, totals, strict=True)])
        labels = [f"{age} step{'' if age == 1 else 's'}" for age in counted]
        colors = [_AGES[min(index, len(_AGES) - 1)] for index in range(len(counted))]
        panel.stackplot(steps, shares, colors=colors, labels=labels, step="mid", linewidth=0)
        panel.set_ylim(0, 100)
        panel.set_ylabel("% of samples")
        panel.legend(loc="upper right", ncols=min(4, len(counted)), fontsize=8, framealpha=0.85, frameon=True, edgecolor="none")
    else:
        steps, mean = _series(rows, "age/mean")
        panel.plot(steps, mean, color=_BLUE, linewidth=1.8)
        panel.set_ylabel("steps")
    if bound is not None:
        panel.set_title(f"{bound} allowed", loc="right", fontsize=9, color=_MUTED, fontweight="normal")


def _time(panel: Any, rows: Sequence[Row]) -> None:
    panel.set_title("Time spent waiting")
    for role, color in (("actor", _RED), ("rollout", _VIOLET)):
        usable = [row for row in rows if row.get("step_s") and row.get(f"wait/{role}_s") is not None]
        shares = [100 * min(1.0, max(0.0, row[f"wait/{role}_s"] / row["step_s"])) for row in usable]
        if usable:
            panel.plot([row["step"] for row in usable], smoothed(shares), color=color, linewidth=1.8, label=role)
    panel.set_ylim(0, 100)
    panel.set_ylabel("% of a step")
    panel.set_xlabel("step")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="center right", ncols=2, fontsize=8, framealpha=0.85, frameon=True, edgecolor="none")
    _, speeds = _series(rows, "tokens_per_s")
    if speeds:
        text = f"{sum(speeds) / len(speeds):,.0f} tokens/s"
        panel.set_title(text, loc="right", fontsize=9, color=_MUTED, fontweight="normal")


def _finish(panel: Any, rows: Sequence[Row], evaluations: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator  # here, as above

    steps = [row["step"] for row in (*rows, *evaluations)]
    if steps:
        panel.set_xlim(min(0, *steps), max(*steps, 1) * 1.01)
    else:
        panel.text(0.5, 0.5, "nothing recorded yet", transform=panel.transAxes, ha="center", va="center", color=_MUTED)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _title(config: dict[str, Any], rows: Sequence[Row]) -> str:
    name = config.get("run", {}).get("name", "run")
    algorithm = config.get("algorithm", {}).get("type")
    # The steps' own times, since the clock of a run begins anew when it is resumed.
    seconds = sum(row.get("step_s") or 0.0 for row in rows)
    length = f"{rows[-1]['step']} steps in {_duration(seconds)}" if seconds else ""
    return "  ·  ".join(part for part in (name, algorithm.upper() if algorithm else "", length) if part)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _series(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: Sequence[float]) -> list[float]:
    """Running means over a centred window of about a twelfth of the length; the ends use what there is."""
    half = max(1, len(values) // 24)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
