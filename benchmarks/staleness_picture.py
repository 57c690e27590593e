"""Draws docs/images/staleness.svg: a few steps of a run with bound 1, from the rules themselves.

    python benchmarks/staleness_picture.py docs/images/staleness.svg

A small calculation, not a run: three groups a step, given generation times, admission by `batch - version <= 1`, publication at
the end of each step.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

BOUND, SIZE, STEPS = 1, 3, 4
TRAIN_S, LOAD_S = 1.5, 0.25
GENERATION_S = (0.9, 1.1, 1.4, 1.0, 2.6, 0.8, 0.9, 1.9, 1.2, 0.7, 1.3, 1.0)
COLORS = ("#9db4d6", "#4f8df5", "#16a37a", "#ef8a2b", "#a05bd0")
INK, MUTED = "#1f2933", "#7b8794"


@dataclass
class Group:
    """From its ticket to the step that consumes it. `runs`: (from, to, version) while it is generated."""

    start: float
    end: float
    runs: list[tuple[float, float, int]] = field(default_factory=list)
    step: int = -1
    used: float = 0.0


def calculate() -> tuple[list[Group], list[tuple[float, float]], list[float]]:
    """Groups, (start, end) of each step, and when the engine holds each version."""
    loads, steps, groups = [0.0], [], []
    waiting = list(GENERATION_S)
    for step in range(STEPS):
        while waiting and len(groups) // SIZE - (len(loads) - 1) <= BOUND and len(groups) < SIZE * STEPS:
            start = max(loads[max(0, len(groups) // SIZE - BOUND)], 0.0)
            groups.append(Group(start, start + waiting.pop(0)))
        own = sorted((group for group in groups if group.step < 0), key=lambda group: group.start)[:SIZE]
        before = steps[-1][1] if steps else 0.0
        start = max(before, min(group.end for group in own))
        end = start
        for group in sorted(own, key=lambda group: group.end):
            begin = max(end, group.end)
            group.step, group.used = step, begin
            end = begin + TRAIN_S / SIZE
        steps.append((start, end))
        loads.append(end + LOAD_S)
    for group in groups:
        edges = [*loads, float("inf")]
        for version in range(len(loads)):
            begin, stop = max(group.start, edges[version]), min(group.end, edges[version + 1])
            if begin < stop:
                group.runs.append((begin, stop, version))
    return groups, steps, loads


def draw(path: Path) -> None:
    """Writes the picture; the same bytes every time."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    groups, steps, loads = calculate()
    last = steps[-1][1] + 0.6
    with rc_context({"svg.hashsalt": "staleness", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        _engine(axes, loads[:-1], last)
        for row, group in enumerate(groups):
            _group(axes, 1.6 + row, group)
        for step, (start, end) in enumerate(steps):
            axes.barh(len(groups) + 2.2, end - start, left=start, height=0.9, color="#e4e7eb", edgecolor=INK, lw=0.8)
            axes.text((start + end) / 2, len(groups) + 2.2, f"step {step}", ha="center", va="center", color=INK)
        axes.set_yticks([0, 1.6 + (len(groups) - 1) / 2, len(groups) + 2.2], ["engine", "groups", "actor"])
        axes.set(xlim=(0, last), ylim=(len(groups) + 3, -0.8), xlabel="time")
        axes.set_xticks([])
        axes.tick_params(length=0, colors=INK)
        axes.spines[["top", "right", "left"]].set_visible(False)
        patches = [Patch(color=COLORS[v], label=f"tokens of version {v}") for v in range(len(loads) - 1)]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text("utf-8").splitlines()) + "\n", "utf-8")


def _engine(axes, loads: list[float], last: float) -> None:
    for version, (start, end) in enumerate(zip(loads, [*loads[1:], last], strict=True)):
        end = min(end, last)
        if start < end:
            axes.barh(0, end - start, left=start, height=0.9, color=COLORS[version])
            axes.text((start + end) / 2, 0, f"version {version}", ha="center", va="center", color="white")
            axes.axvline(start, color=MUTED, lw=0.5, ls=":", zorder=0)


def _group(axes, row: float, group: Group) -> None:
    for start, end, version in group.runs:
        axes.barh(row, end - start, left=start, height=0.62, color=COLORS[version])
    if group.used > group.end:
        axes.plot([group.end, group.used], [row, row], color=MUTED, lw=1, ls=(0, (1, 1.5)))
    age = group.step - group.runs[0][2]
    axes.plot([group.used], [row], marker="|", color=INK, ms=8)
    axes.text(group.used + 0.07, row, f"into step {group.step}: age {age}", va="center", color=INK, fontsize=9)


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/staleness.svg"))
