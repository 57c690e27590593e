"""Rewards of runs in several modes: where they begin and end, as a table and as a picture."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

MODES = {"colocate": 0, "hybrid": 1, "fully_async": 2}  # with the bound that each is run at
COLORS = {"colocate": "#7b8794", "hybrid": "#ea7317", "fully_async": "#4f8df5"}
CONTROL = "no learning"

# case -> mode -> the mean reward of each step
Found = Mapping[str, Mapping[str, Sequence[float]]]


def ends(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the first and the last fifth, and the gap between them in standard errors of it."""
    size = max(2, len(rewards) // 5)
    first, last = rewards[:size], rewards[-size:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
    begin, end = statistics.fmean(first), statistics.fmean(last)
    return begin, end, (end - begin) / max(error, 1e-9)


def fallen(found: Found) -> list[str]:
    """Cases that ended with no higher reward."""
    return [
        f"{case}, {mode}" for case in found if case != CONTROL for mode, r in found[case].items() if ends(r)[1] <= ends(r)[0]
    ]


def table(found: Found, modes: Sequence[str], head: str) -> str:
    """A line for each case, in Markdown."""
    lines = ["| " + " | ".join([head, *map(_titled, modes)]) + " |", "|---" * (len(modes) + 1) + "|"]
    for case, by_mode in found.items():
        name, *more = case.split(", ")
        cells = [", ".join([name if case == CONTROL else f"`{name}`", *more])]
        for mode in modes:
            begin, end, errors = ends(by_mode[mode]) if mode in by_mode else (math.nan,) * 3
            cells.append(f"{begin:.2f} to {end:.2f} ({errors:+.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: Found, path: Path, *, columns: int, share: bool = True) -> None:
    """A small picture for each case. `share`: the same axes for all, which comparing them needs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    control = found.get(CONTROL, {})
    found = {case: by_mode for case, by_mode in found.items() if case != CONTROL}
    lines = math.ceil(len(found) / columns)
    figure = Figure(figsize=(11, 10.2 * lines / columns + 0.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, sharex=share, sharey=True, squeeze=False)
    for axes, (case, by_mode) in zip(grid.flat, found.items(), strict=False):
        for rewards in control.values():
            axes.plot(range(1, len(rewards) + 1), smooth(rewards), color="#b8bfc8", lw=1, ls=":", label=CONTROL)
        for mode, rewards in by_mode.items():
            axes.plot(range(1, len(rewards) + 1), smooth(rewards), color=COLORS[mode], lw=1.3, label=_titled(mode))
        axes.set_title(case, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(color="#e4e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(found) :]:
        axes.set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("mean reward", fontsize=8)
    shown = {label: line for line, label in zip(*grid.flat[0].get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def smooth(values: Sequence[float]) -> list[float]:
    """Means of up to five steps."""
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


def _titled(mode: str) -> str:
    return f"{mode}, bound {MODES[mode]}"
