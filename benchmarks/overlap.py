"""What two cores can gain from generating and training side by side, with the hand-written loops of `limit.py`.

    python benchmarks/overlap.py [--rounds 5] [--iterations 3] [--json FILE]

    in turn, 2 threads    one process: generate 256 samples, train on 256, and so on
    in turn, 1 thread     the same on one core
    side by side          two processes of one thread: one only generates, one only trains
    halves                two processes of one thread: each generates and trains 128 (no exchange of gradients)

The modes run in turn in every round; what is printed are ratios to the first.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")

GROUP, NEW, MICRO_BATCH = 8, 24, 64
# (what a process does, samples, threads, core) of each process of a mode
MODES: dict[str, list[tuple[str, int, int, int | None]]] = {
    "in turn, 2 threads": [("both", 256, 2, None)],
    "in turn, 1 thread": [("both", 256, 1, 0)],
    "side by side": [("generate", 256, 1, 0), ("train", 256, 1, 1)],
    "halves": [("both", 128, 1, 0), ("both", 128, 1, 1)],
}


def work(
    job: str, batch: int, threads: int, core: int | None, iterations: int, barrier: Barrier, going: Any, times: "Queue[float]"
) -> None:
    """One process of a mode: waits for its round, does its share, reports seconds of one iteration."""
    import torch
    from limit import Mini, generate, train_step
    from work import Task, encode_prompts, load_random

    torch.set_num_threads(threads)
    if core is not None:
        os.sched_setaffinity(0, {core})
    model, tokenizer = load_random("tiny")
    mini = Mini(model)
    pairs = [pair for pair in Task(7).samples(batch // GROUP) for _ in range(GROUP)]
    prompts = encode_prompts(tokenizer, pairs)
    length = prompts.size(1)
    cache = mini.make_cache(batch)
    ids = torch.randint(2, len(tokenizer), (batch, length + NEW))
    ids[:, :length] = prompts
    advantages = torch.randn(batch, 1)
    optimizer = torch.optim.AdamW(mini.parameters(), lr=1e-6, foreach=True)

    def once() -> None:
        if job != "train":
            with torch.no_grad():
                generate(mini, prompts, NEW, cache, GROUP)
        if job != "generate":
            train_step(mini, optimizer, ids, advantages, length, MICRO_BATCH)

    once()
    while True:
        barrier.wait()
        if not going.value:
            return
        start = time.perf_counter()
        for _ in range(iterations):
            once()
        times.put((time.perf_counter() - start) / iterations)
        barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the ratios here as well")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"needs two cores, this process may use {len(cores)}")
    context = multiprocessing.get_context("spawn")
    going, times = context.Value("i", 1), context.Queue()
    barriers: dict[str, Any] = {}
    for name, shares in MODES.items():
        barriers[name] = context.Barrier(len(shares) + 1)
        for job, batch, threads, core in shares:
            pinned = None if core is None else cores[core]
            given = (job, batch, threads, pinned, args.iterations, barriers[name], going, times)
            context.Process(target=work, args=given, daemon=True).start()
    rounds: list[dict[str, float]] = []
    for _ in range(args.rounds):
        row = {}
        for name, shares in MODES.items():
            barriers[name].wait()
            row[name] = max(times.get() for _ in shares)
            barriers[name].wait()
        rounds.append(row)
    going.value = 0
    for barrier in barriers.values():
        barrier.wait()
    first = next(iter(MODES))
    print(f"{'':20}{'s/256 samples':>14}{'quicker':>9}")
    ratios = {name: statistics.median(row[first] / row[name] for row in rounds) for name in MODES}
    for name, ratio in ratios.items():
        seconds = statistics.median(row[name] for row in rounds)
        print(f"{name:20}{seconds:14.3f}{ratio:8.2f}x")
    if args.json:
        args.json.write_text(json.dumps(ratios), "utf-8")


if __name__ == "__main__":
    main()
