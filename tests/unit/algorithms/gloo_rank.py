"""One rank of two: each case's gradient on this rank's tokens, summed over the ranks. As a script, the second rank.

What a data-parallel trainer does: the ranks add their sums of gradients and their counts, and divide once.
"""

import sys

import torch
import torch.distributed as dist
from loss_cases import CASES, gradients, part

LENGTHS = [10, 50, 40]
SAMPLES = ((0, 1), (1, 3))  # of each rank


def run(rank: int, rendezvous: str) -> list[list[torch.Tensor]]:
    """Mean gradients by case, the same on both ranks."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        return [_gradients(case, *SAMPLES[rank]) for case in CASES]
    finally:
        dist.destroy_process_group()


def _gradients(case, first, last):
    tokens = case.tokens(LENGTHS)
    loss = case.make()(part(tokens, first, last))
    found, count = gradients(loss.total, tokens), torch.tensor(loss.count, dtype=torch.float64)
    for tensor in (*found, count):
        dist.all_reduce(tensor)
    return [gradient / count for gradient in found]


if __name__ == "__main__":
    run(1, sys.argv[1])
