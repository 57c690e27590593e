"""Every kind of input in every mode: runs of the examples with media, and whether they end with a higher reward.

    python benchmarks/modalities.py [--share 0.5] [--examples shapes_vqa ...] [--modes colocate hybrid fully_async]
                                    [--runtime inprocess] [--json modalities.json] [--plot modalities.png]

Each case is a run of its own (`relax train`), with the settings of the example's file but for the mode, its bound and the
number of steps, of which it does a `--share`. Warm starts and data that are missing are made first; `easy_vqa`,
`spoken_digits` and `whisper_digits` fetch a package for that. What is done is kept in `--json`: a call goes on from there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import runs
from curves import MODES, ends, fallen, plot, table

EXAMPLES = {
    "shapes_vqa": "images",
    "easy_vqa": "images of a data set",
    "spoken_digits": "sounds",
    "whisper_digits": "sounds, Whisper",
    "moving_shapes": "videos",
    "see_hear_read": "image, sound and text",
}


def make(example: str) -> str:
    """The example's folder, with what its run needs."""
    folder = f"examples/{example}"
    run = tomllib.loads((runs.ROOT / folder / "run.toml").read_text("utf-8"))
    needed = [runs.ROOT / run[section]["path"] for section in ("model", "data") if ":" not in run[section]["path"]]
    if (runs.ROOT / folder / "prepare.py").exists() and not all(path.exists() for path in needed):
        subprocess.run([sys.executable, f"{folder}/prepare.py"], cwd=runs.ROOT, check=True)
    if (runs.ROOT / folder / "sft.toml").exists():
        runs.warm_start(folder)
    return folder


def train(example: str, mode: str, folder: Path, args: argparse.Namespace) -> list[float]:
    """The mean reward of each step."""
    steps = tomllib.loads((runs.ROOT / example / "run.toml").read_text("utf-8"))["train"]["num_steps"]
    overrides = [
        f"run.runtime={args.runtime}",
        f"resources.mode={mode}",
        f"rollout.max_staleness={MODES[mode]}",
        f"train.num_steps={max(10, round(args.share * steps))}",
    ]
    rows = runs.train(folder, f"{Path(example).name}-{mode}", overrides, example)
    return [float(row["reward/mean"]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--runtime", choices=("ray", "inprocess"), default="inprocess")
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="keep the rewards of every step here")
    parser.add_argument("--plot", type=Path, help="write the reward curves here (PNG)")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = json.loads(args.json.read_text("utf-8")) if args.json and args.json.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        for example in args.examples:
            folder = make(example)
            by_mode = found.setdefault(f"{example}, {EXAMPLES[example]}", {})
            for mode in args.modes:
                if mode in by_mode:
                    continue
                by_mode[mode] = train(folder, mode, Path(name), args)
                print(f"{example}, {mode}: {ends(by_mode[mode])}", file=sys.stderr)
                if args.json:
                    args.json.write_text(json.dumps(found), "utf-8")
    if args.plot:
        plot(found, args.plot, columns=3, share=False)
    print(table(found, args.modes, "example"))
    worse = fallen(found)
    sys.exit(f"ended with no higher reward: {'; '.join(worse)}" if worse else 0)


if __name__ == "__main__":
    main()
