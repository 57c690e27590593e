"""The three modes and several bounds on equal work: step times, waits, overlap, ages, and what each of them learns.

    python benchmarks/modes.py [--steps 40] [--rounds 2] [--runtime ray] [--cases colocate:0 hybrid:1 fully_async:1 ...]

Each case is the arithmetic example as a user runs it (`relax train`, in a process of its own), with another mode and bound.
The cases run in turn in every round; what is printed are ratios to `colocate` of the same round. Where phases take turns, each
of them has both cores; where they run side by side, each has one. `overlap.py` says what two cores can gain from side by side
at best. The share of it that a case reaches is its gain over bound 0 of the same mode, where the same processes take turns on
one core each, against that gain.

Needs the example's warm-started model: `relax sft examples/arithmetic/sft.toml` makes it, and is called if it is missing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runs

CASES = ["colocate:0", "hybrid:0", "hybrid:1", "fully_async:0", "fully_async:1", "fully_async:2", "fully_async:4"]
COLORS = ("#7b8794", "#f9c38f", "#ea7317", "#9dc0fb", "#4f8df5", "#1c47a8", "#0f9d6b", "#d64550", "#7c5cd6")


@dataclass(slots=True)
class Run:
    """What one run left behind: its rows of `metrics.jsonl`, and seconds that each task waited, by name, of how many."""

    rows: list[dict[str, Any]]
    waited_s: dict[str, float] = field(default_factory=dict)

    def steady(self, warm: int) -> list[dict[str, Any]]:
        return self.rows[min(warm, len(self.rows) // 2) :]

    def step_s(self, warm: int) -> float:
        return statistics.median(row["step_s"] for row in self.steady(warm))

    def wait(self, name: str, warm: int) -> float:
        """Seconds waited, as a share of the steps' seconds."""
        rows = self.steady(warm)
        return sum(float(row.get(name, 0.0)) for row in rows) / sum(float(row["step_s"]) for row in rows)

    def waits_of_tasks(self) -> dict[str, float]:
        """By task of the queue, as a share of the whole run."""
        total = float(self.rows[-1]["time_s"])
        return {name: seconds / total for name, seconds in self.waited_s.items() if name in ("advantages", "reference")}


def train(case: str, folder: Path, args: argparse.Namespace, round_: int) -> Run:
    """One run of a case."""
    mode, bound = case.split(":")
    threads = 2 if mode == "colocate" else 1
    name = f"{mode}-{bound}-{round_}"
    overrides = [
        f"run.runtime={args.runtime}",
        f"resources.mode={mode}",
        f"rollout.max_staleness={bound}",
        f"rollout.engine.num_threads={threads}",
        f"train.backend.num_threads={threads}",
        f"train.num_steps={args.steps}",
        f"train.lr={args.lr}",
        *args.set,
    ]
    rows = runs.train(folder, name, overrides)
    run_dir = folder / name
    stats_file = run_dir / "stats.json"
    stats = json.loads(stats_file.read_text("utf-8")) if stats_file.exists() else {}
    return Run(rows, stats.get("waited_s", {}))


def best_overlap(folder: Path) -> float:
    """What side by side gains over taking turns with one thread, on this machine, now."""
    out = folder / "overlap.json"
    command = [sys.executable, str(runs.ROOT / "benchmarks" / "overlap.py"), "--rounds", "3", "--json", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=runs.ENVIRONMENT)
    ratios = json.loads(out.read_text("utf-8"))
    return float(ratios["side by side"] / ratios["in turn, 1 thread"])


def compare(cases: Mapping[str, Sequence[Run]], possible: float, warm: int) -> list[dict[str, Any]]:
    """A line for each case; ratios are medians over the rounds."""
    base = next(iter(cases))
    lines = []
    for case, own in cases.items():
        mode, bound = case.split(":")
        gains = [b.step_s(warm) / run.step_s(warm) for b, run in zip(cases[base], own, strict=True)]
        gain = statistics.median(gains)
        in_turn = cases.get(f"{mode}:0", cases[base])
        overlap = statistics.median(b.step_s(warm) / run.step_s(warm) for b, run in zip(in_turn, own, strict=True))
        rows = [row for run in own for row in run.steady(warm)]
        fifth = max(1, len(own[0].rows) // 5)
        line: dict[str, Any] = {
            "mode": mode,
            "bound": int(bound),
            "step_time": 1 / gain,
            "gain": gain,
            "gain_by_round": gains,
            "overlap": (overlap - 1) / (possible - 1) if int(bound) else None,
            "wait_actor": statistics.median(run.wait("wait/actor_s", warm) for run in own),
            "wait_rollout": statistics.median(run.wait("wait/rollout_s", warm) for run in own),
            "wait_tasks": own[-1].waits_of_tasks(),
            "age_mean": statistics.fmean(row["age/mean"] for row in rows),
            "age_max": max(row["age/max"] for row in rows),
            "mixed": statistics.fmean(row["age/mixed_fraction"] for row in rows),
            "clip_fraction": statistics.fmean(row["clip_fraction"] for row in rows),
            "rollout_train_kl": statistics.fmean(row["rollout_train_kl"] for row in rows),
            "ess": statistics.fmean(row["ess"] for row in rows),
            "reward_first": statistics.fmean(row["reward/mean"] for run in own for row in run.rows[:fifth]),
            "reward_last": statistics.fmean(row["reward/mean"] for run in own for row in run.rows[-fifth:]),
        }
        lines.append(line)
    return lines


def table(lines: Sequence[Mapping[str, Any]], possible: float) -> str:
    """The lines as a table in Markdown."""
    head = (
        "mode", "bound", "step time to colocate", f"of the possible gain ({possible:.2f} x)", "actor waits",
        "advantages waits", "age, mean and largest", "mixed", "clipped", "`rollout_train_kl`", "`ess`",
        "reward, first and last fifth",
    )  # fmt: skip
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for line in lines:
        cells = (
            line["mode"], str(line["bound"]), f"{line['step_time']:.2f}",
            "-" if line["overlap"] is None else f"{line['overlap']:.0%}", f"{line['wait_actor']:.0%}",
            f"{line['wait_tasks']['advantages']:.0%}" if line["wait_tasks"] else "-",
            f"{line['age_mean']:.2f}, {line['age_max']:.0f}", f"{line['mixed']:.0%}", f"{line['clip_fraction']:.1%}",
            f"{line['rollout_train_kl']:.4f}", f"{line['ess']:.3f}", f"{line['reward_first']:.2f} {line['reward_last']:.2f}",
        )  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def plot(cases: Mapping[str, Sequence[Run]], lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rewards by step and by time (in steps of colocate), all cases in one picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for (case, own), line, color in zip(cases.items(), lines, COLORS, strict=False):
        curve = _smooth([statistics.fmean(rewards) for rewards in zip(*(_rewards(run) for run in own), strict=True)])
        label = case.replace(":", ", bound ")
        by_step.plot(range(1, len(curve) + 1), curve, color=color, lw=1.6, label=label)
        by_time.plot([step * line["step_time"] for step in range(1, len(curve) + 1)], curve, color=color, lw=1.6)
    by_step.set(xlabel="step", ylabel="mean reward", title="equal steps")
    by_time.set(xlabel="time, in steps of colocate", title="equal time")
    for axes in (by_step, by_time):
        axes.grid(color="#e4e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    by_step.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _rewards(run: Run) -> list[float]:
    return [float(row["reward/mean"]) for row in run.rows]


def _smooth(values: Sequence[float], width: int = 7) -> list[float]:
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=5, help="first steps of each run that are left out of times and waits")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--runtime", choices=("ray", "inprocess"), default="ray")
    parser.add_argument("--cases", nargs="+", default=CASES, help="mode:bound; the first is what the others are compared to")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for every run, as for relax train")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--plot", type=Path, help="write the reward curves here (PNG)")
    args = parser.parse_args()
    runs.warm_start()
    done: dict[str, list[Run]] = {case: [] for case in args.cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        possible = best_overlap(folder)
        for round_ in range(args.rounds):
            for case in args.cases:
                done[case].append(train(case, folder, args, round_))
                print(f"round {round_ + 1} of {args.rounds}: {case} done", file=sys.stderr)
            lines = compare(done, possible, args.warm)
            if args.json:
                args.json.write_text(json.dumps({"possible_gain": possible, "cases": lines}, indent=2), "utf-8")
            if args.plot:
                plot(done, lines, args.plot)
    print(table(lines, possible))


if __name__ == "__main__":
    main()
