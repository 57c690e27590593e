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
import sys
import tempfile
from pathlib import Path
from typing import Any

import runs
from curves import CONTROL, MODES, ends, fallen, plot, table

TEACHER = runs.ROOT / ".cache" / "models" / "arithmetic-teacher"
TAUGHT = f"teacher.model.path={TEACHER}"
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
        plot(shown, args.plot, columns=6)
    print(table(shown, args.modes, "algorithm"))
    worse = fallen(shown)
    sys.exit(f"ended with no higher reward: {'; '.join(worse)}" if worse else 0)


if __name__ == "__main__":
    main()
