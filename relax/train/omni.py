"""Micro-batches with images, sounds and videos: each group's media once, however many samples it has.

group's prompt --positions of the model's own--> [3, P] and a delta, which its samples' own tokens go on with;
                 a sample that is alone may have media anywhere
groups' features --encoders, once a group--> embeddings in their places, or what all tokens of the group attend to
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax.data.packing import MicroBatch
from relax.models.causal_lm import Attend
from relax.models.media_forward import MediaForward
from relax.train.backend import TrainBatch

Features = Mapping[str, NDArray[Any]]


def omni_hidden(forward: MediaForward, batch: TrainBatch, micro: MicroBatch, attend: Attend, device: torch.device) -> Tensor:
    """`[T, d]`, after the final norm. With gradients, every encoder takes part, so that all micro-batches are alike in what
    they reach. Raises `ModelError` where a group's media do not fit its prompt."""
    positions = torch.from_numpy(micro.positions).float().repeat(3, 1)
    firsts = np.searchsorted(micro.groups, np.arange(len(micro.prefix_starts) + 1))
    ends = np.append(micro.prefix_starts[1:], len(micro.ids))
    prompts: list[tuple[Features | None, int]] = []
    for group, (start, length, end) in enumerate(zip(micro.prefix_starts, micro.prefix_lengths, ends, strict=True)):
        features = batch.features.get(int(batch.group_ids[micro.rows[firsts[group]]]))
        if features:
            is_alone = firsts[group + 1] - firsts[group] == 1
            prompt = slice(start, end if is_alone else start + length)
            positions[:, prompt], delta = forward.positions(micro.ids[prompt], features)
            positions[:, prompt.stop : end] += delta
        prompts.append((features, int(end - start)))
    encoded = forward.encode_packed(prompts)
    ids = torch.from_numpy(micro.ids).to(device)
    hidden = forward.hidden(ids, positions.to(device), attend, encoded)
    return hidden + forward.touch(encoded) if torch.is_grad_enabled() else hidden
