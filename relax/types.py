"""What travels between the parts of relax. Plain data: numpy arrays and built-in types, no torch, no ray.

Alignment, once and for all: every per-token array of a sample has the length of its token list, and entry `t` speaks of
token `t`, predicted from the tokens before it. Entry 0 is never trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
MaskArray = NDArray[np.uint8]


class Outcome(StrEnum):
    """How one sample ended. Only `OK` and `TRUNCATED` samples carry a reward; the others are never counted as a zero."""

    OK = "ok"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    ENGINE_ERROR = "engine_error"
    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    TOO_LONG = "too_long"

    @property
    def is_trainable(self) -> bool:
        return self in (Outcome.OK, Outcome.TRUNCATED)


class FinishReason(StrEnum):
    """Why an engine stopped generating a completion."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class VersionSegment:
    """Tokens from `start` up to the next segment's start were sampled under policy `version`."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class Media:
    """One image, audio clip or video of a prompt, by reference: the bytes are stored once and shared by the group."""

    kind: str  # "image" | "audio" | "video"
    source: str  # a file inside the data's roots, an address, or a place in the spool: `relax.data.media.source`
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set, ready to be rendered.

    `key` is stable over runs (`"train.jsonl:17"`). `messages` are chat messages (`{"role": ..., "content": ...}`); a plain
    text prompt is held as `text` and is not passed through a chat template. `answer` and `metadata` go to the reward.

    A message with media has a list of parts as content, `{"type": "image" | "audio" | "video"}` and
    `{"type": "text", "text": ...}`; `media` are in the order of those parts.
    """

    key: str
    messages: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples. `top_p = 1.0` and `top_k = 0` mean off. Times and lengths are in tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`len(seeds)` completions of one prompt: the prompt is computed once. A seed fixes a completion's random draws.

    `partials`: what there is already of each seed's completion, or empty. One that ends with `FinishReason.ABORT` is continued
    after its last token, with the draws that it would have had; others are returned as they are. `sampling.max_new_tokens`
    counts the tokens that are there.

    `features`: what the model's processor made of the prompt's media (see `models/processor.py`), for the embedded engine, to
    which `prompt_ids` are then the expanded ones, with a token in the place of each embedding.
    """

    request_id: str
    prompt_ids: Sequence[int]
    seeds: Sequence[int]
    sampling: Sampling
    media: tuple[Media, ...] = ()
    partials: "tuple[Completion, ...]" = ()
    features: Mapping[str, NDArray[Any]] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class Completion:
    """What an engine returns for one seed. `token_ids [R]` int32, `logprobs [R]` float32 at the sampling temperature.

    `versions` are segments over `token_ids`. A stop token that ended the completion is its last token; the tokens that
    complete a stop string are kept as well (they were sampled).
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: tuple[VersionSegment, ...]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Turn:
    """A span of a sample's tokens written by one side: `tokens[start:end]`, `role` as in chat messages."""

    role: str
    start: int
    end: int


@dataclass(slots=True)
class Sample:
    """One trajectory of one prompt.

    `tokens [T]` int32, `loss_mask [T]` uint8 (1 on tokens that the policy sampled), `rollout_logprobs [T]` float32 (0 where
    the mask is 0), `versions`: segments over `tokens`, of which only trained positions count for the age.

    >>> Sample(group_id=7, index=0, tokens=[5, 6, 9, 2], loss_mask=[0, 0, 1, 1], rollout_logprobs=[0, 0, -0.1, -1.2],
    ...        versions=(VersionSegment(2, 4),), reward=1.0, outcome=Outcome.OK)      # doctest: +SKIP
    """

    group_id: int
    index: int
    tokens: IntArray
    loss_mask: MaskArray
    rollout_logprobs: FloatArray
    versions: tuple[VersionSegment, ...]
    outcome: Outcome
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    media: tuple[Media, ...] = ()
    routed_experts: NDArray[np.uint8] | None = None  # [T, L, K] expert ids, where a MoE engine records them
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the trained tokens; raises `ValueError` when nothing is trained."""
        return min(trained_versions(self.loss_mask, self.versions))

    @property
    def newest_version(self) -> int:
        """The newest policy version among the trained tokens; raises `ValueError` when nothing is trained."""
        return max(trained_versions(self.loss_mask, self.versions))


def trained_versions(loss_mask: MaskArray, versions: Sequence[VersionSegment]) -> set[int]:
    """The versions among the positions where `loss_mask [T]` is 1; raises `ValueError` when there is none."""
    ends = [s.start for s in versions[1:]] + [len(loss_mask)]
    found = {s.version for s, end in zip(versions, ends, strict=True) if np.any(loss_mask[s.start : end])}
    if not found:
        raise ValueError("a sample without trained tokens has no policy version")
    return found


def newest_version_only(loss_mask: MaskArray, versions: Sequence[VersionSegment]) -> MaskArray:
    """`loss_mask [T]` with 0 on the tokens of all versions but the newest that is trained."""
    newest = max(trained_versions(loss_mask, versions))
    kept = np.zeros_like(loss_mask)
    for segment, end in zip(versions, [s.start for s in versions[1:]] + [len(loss_mask)], strict=True):
        if segment.version == newest:
            kept[segment.start : end] = loss_mask[segment.start : end]
    return kept


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths in one buffer: row `i` is `values[offsets[i]:offsets[i + 1]]`; `offsets [N + 1]` int64."""

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @staticmethod
    def pack(rows: Sequence[NDArray[Any]]) -> "Ragged":
        """Copies `rows` (at least one, one dtype) into one buffer."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(r) for r in rows], out=offsets[1:])
        return Ragged(np.concatenate(rows), offsets)


# A column of N rows: ragged per-token values, one number per row, or one JSON value per row.
Column = Ragged | NDArray[Any] | list[Any]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One published policy version, as announced to those who load it.

    `transport` and `location` say where the bytes are; `tensors` maps every name to (dtype, shape, offset_bytes) in one
    buffer. It is cut into `buckets` of whole tensors, (start_byte, end_byte, digest) one after the other; `digest` is that of
    buckets and table together, so equal weights have equal digests whatever their version. `canary_tokens` and
    `canary_logprobs` (the trainer's log-prob of each token after the first, at temperature 1) prove that a receiver computes
    with these weights.
    """

    version: int
    transport: str
    location: str
    num_bytes: int
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]
    digest: str
    canary_tokens: tuple[int, ...]
    canary_logprobs: tuple[float, ...]
    buckets: tuple[tuple[int, int, str], ...] = ()
