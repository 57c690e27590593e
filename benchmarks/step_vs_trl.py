"""A step of relax against a step of TRL: the same warm-started model, prompts, group size and learning rate, in one run.

    python benchmarks/step_vs_trl.py --trl-python VENV/bin/python [--rounds 2] [--steps 20]

256 samples a step (32 prompts x 8), at most 24 new tokens, float32, on two cores:
    relax        fully asynchronous on Ray: one generating and one training process of one thread each
    TRL          GRPOTrainer, two threads, one micro-batch (its best setting here)
    TRL async    AsyncGRPOTrainer, one generating and one training process of one thread each
They run in turn, round after round; what is printed are ratios of step times, and the reward curves side by side: a
step that is quicker and learns less is no gain. Without `--trl-python` only relax is measured. TRL wants a venv of its own:
pip install torch==2.13.0, then trl==1.16.0 transformers accelerate datasets requests aiohttp.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from work import Task, warm_folder

HERE = Path(__file__).parent
LR = 5e-5
WINDOW = 5
RUN = """
[run]
name = "{name}"
dir = "{folder}"
[model]
path = "{model}"
[data]
type = "file"
path = "{data}"
shuffle = false
chat_template = false
[reward]
type = "exact"
marker = "="
[rollout]
group_size = {group}
prompts_per_step = {prompts}
max_staleness = {staleness}
max_new_tokens = {max_new}
[train]
num_steps = {steps}
lr = {lr}
[observe]
progress = false
tensorboard = false
samples_per_step = 0
"""


def relax_steps(args: argparse.Namespace, folder: Path, data: Path, name: str) -> list[dict[str, Any]]:
    """Runs `relax train`; its steps, as `metrics.jsonl` has them."""
    settings = {key: getattr(args, key) for key in ("group", "prompts", "staleness", "max_new", "steps", "lr")}
    run_file = folder / f"{name}.toml"
    run_file.write_text(RUN.format(name=name, folder=folder, model=warm_folder(), data=data, **settings), "utf-8")
    _run([sys.executable, "-m", "relax.cli.main", "train", str(run_file)], folder / f"{name}.log", threads=1)
    lines = (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{"step_s": row["step_s"], "reward": row["reward/mean"]} for row in rows if "step_s" in row]


def trl_steps(args: argparse.Namespace, folder: Path, data: Path, script: str, threads: int) -> list[dict[str, Any]]:
    """Runs one of TRL's trainers; its steps."""
    out = folder / f"{script}.json"
    command = [args.trl_python, str(HERE / f"{script}.py"), "--model", str(warm_folder()), "--data", str(data)]
    for key in ("steps", "group", "prompts", "max_new", "lr"):
        command += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
    _run([*command, "--threads", str(threads), "--out", str(out)], folder / f"{script}.log", threads=threads)
    steps: list[dict[str, Any]] = json.loads(out.read_text("utf-8"))["steps"]
    return steps


def _run(command: list[str], log: Path, threads: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "0"}
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-25:])
        sys.exit(f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{tail}")


def write_prompts(file: Path, count: int) -> None:
    """`count` problems, one a line."""
    with file.open("w", encoding="utf-8") as out:
        for a, b in Task(1000).samples(count):
            out.write(json.dumps({"prompt": Task.prompt(a, b), "answer": str(a + b)}) + "\n")


def step_time(runs: list[list[dict[str, Any]]], skip: int) -> float:
    """Seconds a step: the median over windows of `WINDOW` steps of their mean, since asynchronous steps come in bursts."""
    windows = []
    for run in runs:
        times = [step["step_s"] for step in run[skip:]]
        windows += [statistics.mean(times[first : first + WINDOW]) for first in range(max(1, len(times) - WINDOW + 1))]
    return statistics.median(windows)


def report(found: dict[str, list[list[dict[str, Any]]]], skip: int) -> None:
    """Step times, their ratios to relax, and mean rewards of fifths of the run."""
    times = {name: step_time(runs, skip) for name, runs in found.items()}
    print(f"\n{'':12}{'s/step':>9}{'relax is':>11}   reward, fifth by fifth of the run")
    for name, runs in found.items():
        length = min(len(run) for run in runs)
        size = max(1, length // 5)
        curve = [
            statistics.mean(step["reward"] for run in runs for step in run[first : first + size])
            for first in range(0, size * 5, size)
            if first < length
        ]
        ratio = f"{times[name] / times['relax']:.2f} x"
        print(f"{name:12}{times[name]:9.3f}{ratio:>11}   {' '.join(f'{mean:.3f}' for mean in curve)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="Python of a venv with TRL; default: measure relax alone")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-new", type=int, default=24)
    parser.add_argument("--staleness", type=int, default=1, help="bound of relax; TRL's asynchronous trainer keeps its own, 4")
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--skip", type=int, default=3, help="steps at the start of a run that are not timed")
    parser.add_argument("--out", type=Path, help="write every step as JSON")
    args = parser.parse_args()
    found: dict[str, list[list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(prefix="relax-bench-") as name:
        folder = Path(name)
        data = folder / "prompts.jsonl"
        write_prompts(data, args.prompts * (args.steps + 2))
        for turn in range(args.rounds):
            found.setdefault("relax", []).append(relax_steps(args, folder, data, f"relax-{turn}"))
            if args.trl_python:
                found.setdefault("TRL", []).append(trl_steps(args, folder, data, "trl_baseline", 2))
                found.setdefault("TRL async", []).append(trl_steps(args, folder, data, "trl_async_baseline", 1))
            last = {name: round(step_time(runs[-1:], args.skip), 3) for name, runs in found.items()}
            print(f"round {turn + 1}: {last}", flush=True)
    report(found, args.skip)
    if args.out:
        args.out.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
