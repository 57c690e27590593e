"""Micro-batches with images, sounds and videos: each group's media once, however many samples it has.

group's prompt --positions of the model's own--> [3, P] and a delta, which its samples' own tokens go on with;
                 a sample that is alone may have media anywhere
groups' features, joined --encoders, once--> embeddings in their places
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax.data.packing import MicroBatch
from relax.models.causal_lm import Attend
from relax.models.omni_lm import Encoded, OmniForward
from relax.train.backend import TrainBatch

Features = Mapping[str, NDArray[Any]]
_HEARD = ("input_features", "audio_lengths")


def omni_hidden(forward: OmniForward, batch: TrainBatch, micro: MicroBatch, attend: Attend, device: torch.device) -> Tensor:
    """`[T, d]`, after the final norm. With gradients, every encoder takes part, so that all micro-batches are alike in what
    they reach. Raises `ModelError` where a group's media do not fit its prompt."""
    positions = torch.from_numpy(micro.positions).float().repeat(3, 1)
    firsts = np.searchsorted(micro.groups, np.arange(len(micro.prefix_starts) + 1))
    ends = np.append(micro.prefix_starts[1:], len(micro.ids))
    seen: list[Features] = []
    for group, (start, length, end) in enumerate(zip(micro.prefix_starts, micro.prefix_lengths, ends, strict=True)):
        features = batch.features.get(int(batch.group_ids[micro.rows[firsts[group]]]))
        if features:
            is_alone = firsts[group + 1] - firsts[group] == 1
            prompt = slice(start, end if is_alone else start + length)
            positions[:, prompt], delta = forward.positions(micro.ids[prompt], features)
            positions[:, prompt.stop : end] += delta
            seen.append(features)
    encoded = _encode(forward, seen)
    ids = torch.from_numpy(micro.ids).to(device)
    forward.check(ids, encoded)
    hidden = forward.hidden(ids, positions.to(device), attend, encoded)
    return hidden + forward.touch(encoded) if torch.is_grad_enabled() else hidden


def _encode(forward: OmniForward, prompts: Sequence[Features]) -> Encoded:
    """The media of these prompts: what is seen in one pass, what is heard prompt by prompt. Some encoders pad sounds to the
    longest one beside them, and what they hear then depends on it: the engine, too, has only one prompt's at a time."""
    heard = [{name: prompt[name] for name in _HEARD} for prompt in prompts if _HEARD[0] in prompt]
    names = {name for prompt in prompts for name in prompt if name not in _HEARD}
    seen = {name: np.concatenate([prompt[name] for prompt in prompts if name in prompt]) for name in names}
    return Encoded.join([forward.encode(seen), *(forward.encode(sounds) for sounds in heard)])
