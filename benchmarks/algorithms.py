"""Every algorithm in every mode: thirty steps of the arithmetic example, and whether they end with a higher reward.

    python benchmarks/algorithms.py [--steps 30] [--algorithms grpo ppo ...] [--modes colocate hybrid fully_async]
                                    [--runtime inprocess] [--json algorithms.json] [--plot algorithms.png]

Each case is a run of its own (`relax train`) from the same warm-started model, with a batch of 16 x 8 samples. Its line says
the mean reward of the first and of the last fifth of its steps, and how many standard errors lie between. All see the same
sums in the same order, of which some are harder: `no learning` is what the model makes of them as it is. The teacher is the
same model after the whole demo, made at the first call. What is done is kept in `--json`: a call goes on from there.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import runs

TEACHER = runs.ROOT / ".cache" / "models" / "arithmetic-teacher"
TAUGHT = f"teacher.model.path={TEACHER}"
CONTROL = "no learning"
ALGORITHMS: dict[str, list[str]] = {
    CONTROL: ["train.lr=1e-12"],
    "grpo": ["algorithm.type=grpo"],
    "grpo, no deviation": ["algorithm.type=grpo", "algorithm.normalize_std=false"],
    "dr_grpo": ["algorithm.type=dr_grpo"],
    "rloo": ["algorithm.type=rloo"],
    "reinforce_pp": ["algorithm.type=reinforce_pp", "algorithm.kl.coef=0.001"],
    "reinforce_pp_baseline": ["algorithm.type=reinforce_pp_baseline", "algorithm.kl.coef=0.001"],
    "ppo": ["algorithm.type=ppo", "critic.lr=2e-3", "critic.warmup_steps=3"],
    "dapo": ["algorithm.type=dapo"],
    "gspo": ["algorithm.type=gspo", "algorithm.clip_low=0.03", "algorithm.clip_high=0.04"],
    "gspo, tokens": [
        "algorithm.type=gspo",
        "algorithm.token_level=true",
        "algorithm.clip_low=0.03",
        "algorithm.clip_high=0.04",
    ],
    "sapo": ["algorithm.type=sapo"],
    "cispo": ["algorithm.type=cispo"],
    "reinforce, tis": ["algorithm.type=reinforce"],
    "grpo, icepop": ["algorithm.type=grpo", "algorithm.old_logprobs=current", "algorithm.correction.type=icepop"],
    "grpo, decoupled": ["algorithm.type=grpo", "algorithm.old_logprobs=recompute", "algorithm.correction.type=decoupled"],
    "opd": ["algorithm.type=opd", TAUGHT],
    "opd_full": ["algorithm.type=opd_full", TAUGHT],
}
MODES = {"colocate": 0, "hybrid": 1, "fully_async": 2}  # with the bound that each is run at
COLORS = {"colocate": "#7b8794", "hybrid": "#ea7317", "fully_async": "#4f8df5"}


def make_teacher() -> None:
    """The demo's own run, whose model is kept."""
    if not (TEACHER / "config.json").exists():
        with tempfile.TemporaryDirectory() as name:
            runs.train(Path(name), "teacher", ["run.runtime=inprocess", "train.num_steps=150"])
            (Path(name) / "teacher" / "hf").rename(TEACHER)


def train(algorithm: str, mode: str, folder: Path, args: argparse.Namespace) -> list[float]:
    """The mean reward of each step."""
    overrides = [
        f"run.runtime={args.runtime}",
        f"resources.mode={mode}",
        f"rollout.max_staleness={MODES[mode]}",
        "rollout.prompts_per_step=16",
        f"train.num_steps={args.steps}",
        f"train.lr={args.lr}",
        "train.schedule=constant",
    ]
    name = f"{mode}-{algorithm}".replace(",", "").replace(" ", "-")
    rows = runs.train(folder, name, overrides + ALGORITHMS[algorithm])
    return [float(row["reward/mean"]) for row in rows]


def ends(rewards: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the first and the last fifth, and the gap between them in standard errors of it."""
    size = max(2, len(rewards) // 5)
    first, last = rewards[:size], rewards[-size:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
    begin, end = statistics.fmean(first), statistics.fmean(last)
    return begin, end, (end - begin) / max(error, 1e-9)


def table(found: Mapping[str, Mapping[str, Sequence[float]]], modes: Sequence[str]) -> str:
    """A line for each algorithm, in Markdown."""
    head = ["algorithm", *map(_case, modes)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for algorithm, by_mode in found.items():
        name, *more = algorithm.split(", ")
        cells = [", ".join([name if algorithm == CONTROL else f"`{name}`", *more])]
        for mode in modes:
            begin, end, errors = ends(by_mode[mode]) if mode in by_mode else (math.nan,) * 3
            cells.append(f"{begin:.2f} to {end:.2f} ({errors:+.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """A small picture for each algorithm, all on the same axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, control = 6, found.get(CONTROL, {})
    found = {algorithm: by_mode for algorithm, by_mode in found.items() if algorithm != CONTROL}
    lines = math.ceil(len(found) / columns)
    figure = Figure(figsize=(11, 1.7 * lines + 0.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (algorithm, by_mode) in zip(grid.flat, found.items(), strict=False):
        for rewards in control.values():
            axes.plot(range(1, len(rewards) + 1), _smooth(rewards), color="#b8bfc8", lw=1, ls=":", label=CONTROL)
        for mode, rewards in by_mode.items():
            axes.plot(range(1, len(rewards) + 1), _smooth(rewards), color=COLORS[mode], lw=1.3, label=_case(mode))
        axes.set_title(algorithm, fontsize=8)
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


def _case(mode: str) -> str:
    return f"{mode}, bound {MODES[mode]}"


def _smooth(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--runtime", choices=("ray", "inprocess"), default="inprocess")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="keep the rewards of every step here")
    parser.add_argument("--plot", type=Path, help="write the reward curves here (PNG)")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = json.loads(args.json.read_text("utf-8")) if args.json and args.json.exists() else {}
    runs.warm_start()
    make_teacher()
    with tempfile.TemporaryDirectory() as name:
        for algorithm in args.algorithms:
            by_mode = found.setdefault(algorithm, {})
            for mode in args.modes:
                if mode in by_mode:
                    continue
                by_mode[mode] = train(algorithm, mode, Path(name), args)
                print(f"{algorithm}, {mode}: {ends(by_mode[mode])}", file=sys.stderr)
                if args.json:
                    args.json.write_text(json.dumps(found), "utf-8")
    shown = {algorithm: found[algorithm] for algorithm in args.algorithms}
    if args.plot:
        plot(shown, args.plot)
    print(table(shown, args.modes))
    fallen = [f"{a}, {m}" for a in shown if a != CONTROL for m in args.modes if ends(shown[a][m])[1] <= ends(shown[a][m])[0]]
    sys.exit(f"ended with no higher reward: {'; '.join(fallen)}" if fallen else 0)


if __name__ == "__main__":
    main()
