"""Batches of grouped samples for the trainer's tests."""

import numpy as np

from relax.train.backend import TrainBatch
from relax.types import Ragged

VOCABULARY = 300


def make_batch(sizes=(1, 3, 4, 8), seed=0, longest=12, prompts=(1, 9), columns=True, holes=True) -> TrainBatch:
    """Groups of `sizes` samples with shared prompts, interleaved; some samples have untrained spans inside."""
    rng = np.random.default_rng(seed)
    rows = []
    for group, size in enumerate(sizes):
        prompt = rng.integers(3, VOCABULARY, rng.integers(*prompts))
        for _ in range(size):
            length = int(rng.integers(1, longest + 1))
            mask = np.r_[np.zeros(len(prompt)), np.ones(length)]
            if holes and length > 4:
                mask[len(prompt) + 1 : len(prompt) + 3] = 0
            tokens = np.r_[prompt, rng.integers(3, VOCABULARY, length)]
            rows.append((group * 7, tokens.astype(np.int32), mask.astype(np.uint8)))
    rows = [rows[i] for i in rng.permutation(len(rows))]
    tokens, mask = Ragged.pack([r[1] for r in rows]), Ragged.pack([r[2] for r in rows])

    def column(scale, shift) -> Ragged | None:
        values = rng.normal(shift, scale, len(tokens.values)).astype(np.float32)
        return Ragged(values, tokens.offsets) if columns else None

    return TrainBatch(
        tokens,
        mask,
        np.asarray([r[0] for r in rows]),
        rollout_logprobs=column(0.3, -5.7),
        advantages=column(1.0, 0.0),
        old_logprobs=column(0.3, -5.7),
        ref_logprobs=column(0.3, -5.7),
    )


def take(batch: TrainBatch, rows) -> TrainBatch:
    """Some rows of a batch."""

    def column(ragged: Ragged | None) -> Ragged | None:
        return None if ragged is None else Ragged.pack([ragged[row] for row in rows])

    return TrainBatch(
        column(batch.tokens),
        column(batch.loss_mask),
        batch.group_ids[list(rows)],
        rollout_logprobs=column(batch.rollout_logprobs),
        advantages=column(batch.advantages),
        old_logprobs=column(batch.old_logprobs),
        ref_logprobs=column(batch.ref_logprobs),
    )
