"""What asynchrony gains where answers take very different times: real roles, real queue, sleeping engines and trainer.

    python benchmarks/long_tail.py [--rounds 2] [--steps 40] [--step-s 1.0] [--sigma 1.0] [--json FILE]

Engines answer each sample after a time drawn from a log-normal distribution, as remote GPUs would; the trainer's step takes a
fixed time. Both sleep, so that two cores are enough to hold any number of them. With `--load 0.9` the engines together have so
few slots that they are busy nine tenths of the time when a batch is wanted every step; else any number. Two plans of a cluster:

    equal phases    a batch's slowest answer comes, on average, after as long as a step of training takes
    equal devices   colocate has twice the devices in each phase: it trains twice as quickly, but answers take as long as ever

The response budget ends an answer after two steps of training (`--budget`; 0: never), as `rollout.max_new_tokens` does. Times
are the same in every mode, fixed by the prompt. Printed are ratios to colocate of the same plan, in one run, and how
long the trainer waited for data as a share of its steps, beside the least that it has to wait for these answers at that bound
if nothing else took any time.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax.config.load import make_config
from relax.config.run import RunConfig
from relax.control.controller import Controller
from relax.control.inprocess import InProcessRuntime
from relax.engines.engine import EngineAsleep, EngineStats
from relax.models.tiny import build_tiny_model
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder
from relax.roles.rollout import sample_seeds
from relax.train.backend import StepSums, TrainBatch
from relax.types import Completion, FinishReason, GenerateRequest, Ragged, VersionSegment, WeightManifest

LONGEST = 64  # tokens of the slowest answer
PLANS = {"equal phases": 1.0, "equal devices": 0.5}  # colocate's training time as a share of the others'


@dataclass(frozen=True, slots=True)
class Work:
    """What every mode does alike. `longest_s`: mean over batches of the slowest answer's time."""

    prompts: int
    group: int
    steps: int
    step_s: float
    longest_s: float
    sigma: float
    load: float = 0.0
    budget_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Mean time of an answer."""
        return self.median_s() * float(np.exp(self.sigma**2 / 2))

    @property
    def slots(self) -> int:
        """Answers that the engine works on at a time."""
        samples = self.prompts * self.group
        return ceil(samples * self.mean_s / (self.load * self.step_s)) if self.load else 1 << 30

    def seconds(self, seed: int) -> float:
        """How long the answer of a seed takes."""
        seconds = self.median_s() * float(np.random.default_rng(seed).lognormal(0.0, self.sigma))
        return min(seconds, self.budget_s) if self.budget_s else seconds

    def least_wait(self, bound: int, run_seed: int, warm: int) -> float:
        """The trainer's wait as a share of its time, with slots without end and a queue that costs nothing."""
        ends, waited = [0.0], [0.0]
        for step in range(self.steps):
            start = ends[max(0, step - bound)]  # the version that the batch needs is there
            prompts = range(step * self.prompts, (step + 1) * self.prompts)
            seeds = [sample_seeds(run_seed, prompt, self.group) for prompt in prompts]
            now, wait = ends[-1], 0.0
            for ready in sorted(start + max(map(self.seconds, group)) for group in seeds):
                wait += max(0.0, ready - now)
                now = max(now, ready) + self.step_s / self.prompts
            ends.append(now)
            waited.append(wait)
        return sum(waited[warm + 1 :]) / (ends[-1] - ends[warm])

    @cache  # noqa: B019 there is one work
    def median_s(self) -> float:
        """The distribution's scale, so that a batch's slowest answer takes `longest_s` on average."""
        drawn = np.random.default_rng(0).lognormal(0.0, self.sigma, (4000, self.prompts * self.group))
        return float(self.longest_s / drawn.max(1).mean())


class SleepyEngine:
    """Each answer comes after its own time, once it has a slot."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._token_s = work.longest_s / LONGEST
        self._changes: list[tuple[float, int]] = []
        self._num_running = 0
        self._slots = asyncio.Semaphore(work.slots)
        self._is_asleep = True

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        if self._is_asleep:
            raise EngineAsleep("the engine has no weights")
        self._num_running += len(request.seeds)
        try:
            longest = request.sampling.max_new_tokens
            return await asyncio.gather(*(self._answer(seed, longest) for seed in request.seeds))
        finally:
            self._num_running -= len(request.seeds)

    async def _answer(self, seed: int, longest: int) -> Completion:
        rng = np.random.default_rng(seed)
        seconds = self._work.seconds(seed)
        async with self._slots:
            started = asyncio.get_running_loop().time()
            await asyncio.sleep(seconds)
        length = int(np.clip(seconds / self._token_s, 1, longest))
        times = [when for when, _ in self._changes]
        held = [self._changes[bisect_right(times, started + seconds * t / length) - 1][1] for t in range(length)]
        starts = [t for t in range(length) if t == 0 or held[t] != held[t - 1]]
        tokens = rng.integers(10, 200, length).astype(np.int32)
        segments = tuple(VersionSegment(t, held[t]) for t in starts)
        return Completion(tokens, np.full(length, -1.0, np.float32), segments, FinishReason.STOP)

    async def abort(self, request_ids: Sequence[str]) -> None:
        raise AssertionError("nobody aborts here")

    async def progress(self, request_ids: Sequence[str]) -> dict[str, list[Completion]]:
        return {}

    async def load_weights(self, manifest: WeightManifest) -> float:
        self._changes.append((asyncio.get_running_loop().time(), manifest.version))
        self._is_asleep = False
        return 0.0

    async def sleep(self) -> None:
        self._is_asleep = True

    async def stats(self) -> EngineStats:
        version = self._changes[-1][1] if self._changes else -1
        return EngineStats(version, self._num_running, 0, 0, 0, 0.0)

    async def close(self) -> None:
        self._is_asleep = True


class SleepyBackend:
    """A step takes `step_s`, spread over its samples as they come."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s
        self._weight = torch.zeros(8)

    def forward_backward(self, batch: TrainBatch) -> StepSums:
        time.sleep(self._sample_s * len(batch))
        return StepSums({"loss": (0.0, float(len(batch)))})

    def finish_step(self) -> dict[str, float]:
        self._weight += 1
        return {"grad_norm": 1.0, "lr": 0.1, "skipped": 0.0}

    def weights(self) -> Mapping[str, Any]:
        return {"w": self._weight}

    def canary(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return (1, 2), (-1.0,)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def logprobs(self, batch: TrainBatch, weights: Mapping[str, Any] | None = None) -> Ragged:
        return Ragged(np.full(len(batch.tokens.values), -1.0, np.float32), batch.tokens.offsets)


def make(work: Work, mode: str, bound: int, model: Path, folder: Path, name: str) -> RunConfig:
    """The run file of one mode and bound."""
    in_flight = (bound + 1) * work.prompts * work.group
    raw: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder), "runtime": "inprocess"},
        "model": {"path": str(model)},
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition", "size": 5000},
        "reward": {"type": "format", "pattern": ".*"},
        "resources": {"mode": mode},
        "rollout": {
            "group_size": work.group,
            "prompts_per_step": work.prompts,
            "max_new_tokens": LONGEST * 4,
            "max_staleness": bound,
            "engine": {"type": "local", "max_slots": in_flight},
        },
        "train": {"num_steps": work.steps, "checkpoint": {"every": 0}},
        "observe": {"progress": False, "tensorboard": False, "samples_per_step": 0},
    }
    return make_config(raw, [])


def measure(work: Work, mode: str, bound: int, train_share: float, model: Path, folder: Path, warm: int) -> dict[str, float]:
    """One run: seconds of a step, the trainer's wait for data as a share of it, ages; the first `warm` steps left out."""
    name = f"{mode}-{bound}-{time.monotonic_ns()}"
    config = make(work, mode, bound, model, folder, name)
    sample_s = train_share * work.step_s / (work.prompts * work.group)
    runtime = InProcessRuntime(config, lambda config: SleepyBackend(sample_s), lambda config, name: SleepyEngine(work))
    run_dir = folder / name
    run_dir.mkdir()
    recorder = RunRecorder(run_dir, config.observe)
    try:
        asyncio.run(Controller(config, run_dir, runtime, recorder, Progress(config)).run())
    finally:
        recorder.close()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()][warm:]
    seconds = sum(row["step_s"] for row in rows)
    return {
        "step_s": seconds / len(rows),
        "wait": sum(row["wait/actor_s"] for row in rows) / seconds,
        "age_mean": statistics.fmean(row["age/mean"] for row in rows),
        "age_max": max(row["age/max"] for row in rows),
    }


def compare(
    work: Work, cases: Sequence[tuple[str, int]], rounds: int, folder: Path, plans: Sequence[str]
) -> list[dict[str, Any]]:
    """All cases in turn, `rounds` times; a line for each case and plan."""
    model = folder / "model"
    build_tiny_model(model, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512)
    warm = min(5, work.steps // 3)
    bases: dict[str, list[float]] = {plan: [] for plan in plans}
    found: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for plan in plans:
            bases[plan].append(measure(work, "colocate", 0, PLANS[plan], model, folder, warm)["step_s"])
        for mode, bound in cases:
            found[mode, bound].append(measure(work, mode, bound, 1.0, model, folder, warm))
    lines = []
    for (mode, bound), runs in found.items():
        line: dict[str, Any] = {"mode": mode, "bound": bound, "rounds": rounds}
        for plan, base in bases.items():
            line[plan] = statistics.median(b / run["step_s"] for b, run in zip(base, runs, strict=True))
        line["least_wait"] = work.least_wait(bound, make(work, mode, bound, model, folder, "any").run.seed, warm)
        line |= {name: statistics.median(run[name] for run in runs) for name in ("wait", "age_mean", "age_max")}
        lines.append(line)
    return lines


def table(lines: Sequence[Mapping[str, Any]], plans: Sequence[str]) -> str:
    """The lines as a table in Markdown."""
    head = [
        "mode",
        "bound",
        *(f"quicker than colocate, {plan}" for plan in plans),
        "trainer waits",
        "at least",
        "age, mean",
        "age, largest",
    ]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for line in lines:
        ratios = [f"{line[plan]:.2f} x" for plan in plans]
        ages = [f"{line['age_mean']:.2f}", f"{line['age_max']:.0f}"]
        rows.append(
            "| "
            + " | ".join([line["mode"], str(line["bound"]), *ratios, f"{line['wait']:.2%}", f"{line['least_wait']:.2%}", *ages])
            + " |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=1.0, help="how long a step of training takes")
    parser.add_argument("--longest", type=float, default=1.0, help="a batch's slowest answer, in steps of training")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the times' log-normal distribution")
    parser.add_argument("--budget", type=float, default=2.0, help="longest time of an answer, in steps of training")
    parser.add_argument("--load", type=float, default=0.0, help="share of the time that the engines' slots are busy")
    parser.add_argument("--bounds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--modes", nargs="+", default=["hybrid", "fully_async"])
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    parser.add_argument("--at-least", type=float, help="exit code 1 unless every ratio to equal phases is so high")
    args = parser.parse_args()
    torch.set_num_threads(1)
    work = Work(
        args.prompts,
        args.group,
        args.steps,
        args.step_s,
        args.longest * args.step_s,
        args.sigma,
        args.load,
        args.budget * args.step_s,
    )
    cases = [(mode, bound) for mode in args.modes for bound in args.bounds]
    with tempfile.TemporaryDirectory() as folder:
        lines = compare(work, cases, args.rounds, Path(folder), args.plans)
    median, mean = work.median_s() / work.step_s, work.mean_s / work.step_s
    print(f"an answer takes {mean:.2f} steps of training on average, half of them {median:.2f} or less; slots: {work.slots}")
    print(table(lines, args.plans))
    if args.json:
        args.json.write_text(json.dumps(lines, indent=2), "utf-8")
    if args.at_least and min(line[args.plans[0]] for line in lines) < args.at_least:
        sys.exit(f"less than {args.at_least} x")


if __name__ == "__main__":
    main()
