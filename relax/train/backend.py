"""What the actor asks of a training back end."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from relax.types import Ragged, WeightManifest

# By group id: what the model's processor made of the media in a group's prompt (see `models/processor.py`).
GroupFeatures = Mapping[int, Mapping[str, NDArray[Any]]]
NO_FEATURES: GroupFeatures = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """N samples, ragged. Each per-token column has the lengths of `tokens`; entry 0 of a sample is never trained.

    `tokens` int32, `loss_mask` uint8; float32 `advantages`, `rollout_logprobs`, `old_logprobs`, `ref_logprobs`,
    `teacher_logprobs`; `teacher_top_ids` int32 and `teacher_top_logprobs` float32 `[T, K]`: the teacher's most likely tokens at
    each place; `values` and `returns` float32 for a critic.
    `group_ids [N]` int64: samples of a group share their prompt, which is computed once. Groups without `features` are of text.
    """

    tokens: Ragged
    loss_mask: Ragged
    group_ids: NDArray[np.int64]
    rollout_logprobs: Ragged | None = None
    advantages: Ragged | None = None
    old_logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    teacher_logprobs: Ragged | None = None
    teacher_top_ids: Ragged | None = None
    teacher_top_logprobs: Ragged | None = None
    values: Ragged | None = None
    returns: Ragged | None = None
    features: GroupFeatures = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class StepSums:
    """Metrics of one optimizer step as (sum, count) pairs and maxima, merged over micro-batches; nothing averages averages."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: "StepSums") -> None:
        for name, (total, count) in other.sums.items():
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (before[0] + total, before[1] + count)
        for name, value in other.maxima.items():
            self.maxima[name] = max(value, self.maxima.get(name, value))

    def values(self) -> dict[str, float]:
        """Means and maxima by name; a mean over nothing is left out.

        `x/mean_square` becomes `x/std`, the deviation over everything that was summed; the importance weights also give `ess`,
        the effective share of samples `(sum w)^2 / (n sum w^2)`.
        """
        means = {name: total / count for name, (total, count) in self.sums.items() if count > 0}
        for name in [name for name in means if name.endswith("/mean_square")]:
            stem, square = name.removesuffix("/mean_square"), means.pop(name)
            mean = means[f"{stem}/mean"]
            means[f"{stem}/std"] = math.sqrt(max(square - mean**2, 0.0))
            if stem == "importance_weight" and square > 0:
                means["ess"] = mean**2 / square
        return means | self.maxima


class TrainBackend(Protocol):
    """One step: any number of `forward_backward`, in which gradients of un-normalised sums accumulate; then `finish_step`
    divides by the count over the whole batch, clips, and steps the optimizer. Calls are blocking; the actor runs them in a
    thread. Names and tensors are those of the Hugging Face model."""

    def forward_backward(self, batch: TrainBatch) -> StepSums:
        """Splits the batch into micro-batches under the token budget and adds their gradients."""
        ...

    def finish_step(self) -> dict[str, float]:
        """Ends the step; returns `grad_norm`, `lr` and `skipped` (1.0 when a non-finite gradient was thrown away)."""
        ...

    def logprobs(self, batch: TrainBatch, weights: Mapping[str, Any] | None = None) -> Ragged:
        """Log-probs `[T]` float32 of each sample's trained tokens at the sampling temperature, without gradients; else 0.

        `weights`: compute with these in place of its own, which are back in place, bit by bit, afterwards.
        """
        ...

    def top_logprobs(self, batch: TrainBatch, top_k: int, num_ids: int) -> tuple[Ragged, Ragged]:
        """The `top_k` most likely tokens with ids below `num_ids` in place of each trained token, likeliest first: ids int32
        and log-probs float32 `[T, top_k]` at the sampling temperature; 0 at the others."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The current weights (torch tensors) by Hugging Face name, a tied tensor under one name."""
        ...

    def put_weights(self, weights: Mapping[str, Any]) -> None:
        """Copies tensors, by Hugging Face name, in place of its own weights; for roles that only score."""
        ...

    def load_weights(self, manifest: WeightManifest) -> float:
        """Takes a published version in place of its own weights, proven by digest and canary; for roles that only score.

        Returns the canary's difference; raises `WeightSyncError` and keeps its weights otherwise.
        """
        ...

    def canary(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens, and the current log-probs at temperature 1 of each after the first."""
        ...

    def save(self, folder: Path) -> None:
        """Weights, optimizer, schedule and random state: `load` continues exactly."""
        ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None:
        """A folder that `from_pretrained` loads, tokenizer included."""
        ...


class ValueBackend(TrainBackend, Protocol):
    """What a critic asks of its back end besides: it learns `returns`, and its policy methods have no meaning."""

    def values(self, batch: TrainBatch) -> Ragged:
        """The value `[T]` float32 of what stands before each trained token; else 0."""
        ...

    def forget_gradients(self) -> None:
        """Drops what was gathered since the last step."""
        ...
