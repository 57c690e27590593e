"""Stale samples with and without correction: the arithmetic example with a bound of 4.

    python benchmarks/stability.py [--steps 80] [--lr 4e-4] [--seeds 2] [--json stability.json] [--plot stability.png]

`reinforce, none` is the plain policy gradient that takes stale samples for fresh ones (`uncorrected.py`: relax itself refuses
it with a bound above 0); all others are as relax offers them. Every case has the same settings but for its algorithm.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import runs
from curves import smooth

CASES: dict[str, list[str]] = {
    "reinforce, none": [
        *("algorithm.type=custom", "algorithm.path=uncorrected:baseline", "algorithm.objective=uncorrected:Uncorrected"),
        "algorithm.old_logprobs=current",
    ],
    "reinforce, tis": ["algorithm.type=reinforce"],
    "reinforce, icepop": ["algorithm.type=reinforce", "algorithm.correction.type=icepop"],
    "grpo": ["algorithm.type=grpo", "algorithm.normalize_std=false"],
    "grpo, decoupled": [
        *("algorithm.type=grpo", "algorithm.normalize_std=false", "algorithm.old_logprobs=recompute"),
        "algorithm.correction.type=decoupled",
    ],
    "cispo": ["algorithm.type=cispo", "algorithm.normalize_std=false"],
}
COLORS = ("#d64550", "#0f9d6b", "#9dc0fb", "#4f8df5", "#1c47a8", "#7c5cd6")
SHOWN = {"reward/mean": "mean reward", "rollout_train_kl": "rollout_train_kl"}


def train(case: str, seed: int, folder: Path, args: argparse.Namespace) -> list[dict[str, float]]:
    """The rows of one run."""
    overrides = [
        f"run.seed={seed}",
        f"run.runtime={args.runtime}",
        f"rollout.max_staleness={args.bound}",
        "rollout.prompts_per_step=16",
        f"train.num_steps={args.steps}",
        f"train.lr={args.lr}",
        "train.schedule=constant",
    ]
    rows = runs.train(folder, f"{case.replace(', ', '-')}-{seed}", overrides + CASES[case])
    return [{name: float(row[name]) for name in (*SHOWN, "age/mean", "ess")} for row in rows]


def fifths(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """The mean reward of each fifth."""
    size = len(rows) // 5
    return [statistics.fmean(row["reward/mean"] for row in rows[i * size : (i + 1) * size]) for i in range(5)]


def table(found: Mapping[str, Sequence[Sequence[Mapping[str, float]]]]) -> str:
    """A line for each case, means over the seeds, in Markdown."""
    lines = ["| algorithm, correction | mean reward of each fifth | lowest last fifth | age | `ess` |", "|---" * 5 + "|"]
    for case, seeds in found.items():
        means = [statistics.fmean(values) for values in zip(*(fifths(rows) for rows in seeds), strict=True)]
        age, ess = (statistics.fmean(row[name] for rows in seeds for row in rows) for name in ("age/mean", "ess"))
        lowest = min(fifths(rows)[-1] for rows in seeds)
        lines.append(f"| {case} | {' '.join(f'{mean:.2f}' for mean in means)} | {lowest:.2f} | {age:.1f} | {ess:.2f} |")
    return "\n".join(lines)


def plot(found: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], path: Path) -> None:
    """Reward and distance to the sampling policy by step; a line for each seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, label) in zip(figure.subplots(1, 2), SHOWN.items(), strict=True):
        for (case, seeds), color in zip(found.items(), COLORS, strict=True):
            for number, rows in enumerate(seeds):
                values = [row[name] for row in rows]
                axes.plot(range(1, len(values) + 1), smooth(values), color=color, lw=1.3, label=None if number else case)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(color="#e4e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[1].set(yscale="log", ylim=(1e-4, 1))
    figure.axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--bound", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--runtime", choices=("ray", "inprocess"), default="inprocess")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="keep the numbers here; a call goes on from there")
    parser.add_argument("--plot", type=Path, help="write the curves here (PNG)")
    args = parser.parse_args()
    found: dict[str, list[Any]] = json.loads(args.json.read_text("utf-8")) if args.json and args.json.exists() else {}
    runs.warm_start()
    with tempfile.TemporaryDirectory() as name:
        for seed in range(args.seeds):
            for case in args.cases:
                seeds = found.setdefault(case, [])
                if len(seeds) > seed:
                    continue
                seeds.append(train(case, seed, Path(name), args))
                print(f"{case}, seed {seed}: {fifths(seeds[-1])}", file=sys.stderr)
                if args.json:
                    args.json.write_text(json.dumps(found), "utf-8")
    if args.plot:
        plot(found, args.plot)
    print(table(found))


if __name__ == "__main__":
    main()
