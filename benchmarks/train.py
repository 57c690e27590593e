"""relax's training back end against the hand-written training loop of `limit.py`, on equal samples, in one run.

    python benchmarks/train.py [--threads 1] [--repeats 7]

Three kinds of work on the tiny model, 256 samples a step, forward, backward, clipping and AdamW:
    natural   32 prompts x 8 responses of 9 to 22 tokens, as the task has them: the loop pads them to the longest
    full      32 prompts x 8 responses of 24 tokens: nothing to pad
    alone     256 prompts x 1 response of 24 tokens: nothing to pad, nothing to share
The ratio is the loop's time over relax's: above 1, relax is faster. `logprobs` is the forward pass alone.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from limit import Mini, alternate, logprobs, median, train_step
from work import Task, encode, load_random

from relax.config import make_config
from relax.train.backend import TrainBatch
from relax.train.torch_backend import TorchBackend
from relax.types import Ragged

_BATCH, _LONGEST = 256, 24


def make_rows(tokenizer: Any, kind: str) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Token rows, their group ids, and the length of every prompt."""
    size = 1 if kind == "alone" else 8
    rng = np.random.default_rng(0)
    rows = []
    for pair in Task(7).samples(_BATCH // size):
        prompt = encode(tokenizer, Task.prompt(*pair))
        for other in Task(int(rng.integers(1 << 30))).samples(size):
            answer = [*encode(tokenizer, Task.solution(*other)), tokenizer.eos_token_id]
            if kind != "natural":
                answer = rng.integers(2, len(tokenizer), _LONGEST).tolist()
            rows.append(np.asarray(prompt + answer, np.int32))
    return rows, np.repeat(np.arange(_BATCH // size), size), len(prompt)


def make_batch(rows: list[np.ndarray], groups: np.ndarray, prompt_length: int) -> TrainBatch:
    tokens = Ragged.pack(rows)
    mask = Ragged.pack([(np.arange(len(row)) >= prompt_length).astype(np.uint8) for row in rows])
    rng = np.random.default_rng(1)
    advantages = np.repeat(rng.normal(size=len(rows)).astype(np.float32), np.diff(tokens.offsets))
    old = Ragged(np.full(len(tokens.values), -7.0, np.float32), tokens.offsets)
    return TrainBatch(tokens, mask, groups, rollout_logprobs=old, advantages=Ragged(advantages, tokens.offsets))


def measure(kind: str, model: Any, tokenizer: Any, backend: TorchBackend, repeats: int) -> dict[str, float]:
    rows, groups, prompt_length = make_rows(tokenizer, kind)
    batch = make_batch(rows, groups, prompt_length)
    mini = Mini(model)
    optimizer = torch.optim.AdamW(mini.parameters(), lr=1e-6, foreach=True)
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(row)
    advantages = torch.randn(len(rows), 1)

    def relax_step() -> None:
        backend.forward_backward(batch)
        backend.finish_step()

    @torch.no_grad()
    def loop_logprobs(micro_batch: int) -> None:
        for part in ids.split(micro_batch):
            logprobs(mini, part, prompt_length)

    def loop_step(micro_batch: int) -> None:
        train_step(mini, optimizer, ids, advantages, prompt_length, micro_batch)

    times = alternate(
        repeats,
        relax=relax_step,
        loop_64=lambda: loop_step(64),
        loop_256=lambda: loop_step(256),
        relax_logprobs=lambda: backend.logprobs(batch),
        loop_logprobs=lambda: loop_logprobs(64),
    )
    found = {name: median(values) for name, values in times.items()}
    best_loop = min(found["loop_64"], found["loop_256"])
    return {
        "train": round(best_loop / found["relax"], 2),
        "logprobs": round(found["loop_logprobs"] / found["relax_logprobs"], 2),
        "relax_s": round(found["relax"], 4),
        "loop_s": round(best_loop, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", default=["natural", "full", "alone"])
    parser.add_argument("overrides", nargs="*", help="settings of relax, for example train.logprob_chunk=1024")
    options = parser.parse_args()
    model, tokenizer = load_random(options.size)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        tokenizer.save_pretrained(folder)
        raw = {
            "model": {"path": folder},
            "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
            "reward": {"type": "exact"},
            "train": {"num_steps": 1, "backend": {"num_threads": options.threads}},
        }
        backend = TorchBackend(make_config(raw, options.overrides))
        torch.set_num_threads(options.threads)
        for kind in options.kinds:
            print(json.dumps({"work": kind} | measure(kind, model, tokenizer, backend, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
