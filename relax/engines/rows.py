"""The rows of the batch that is being decoded, as columns: what a step does to all of them is done at once."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax.engines.groups import Group
from relax.engines.sampling import SamplingRows, uniforms
from relax.engines.stopping import StopStrings
from relax.types import Completion, FinishReason, VersionSegment

_NO_TOKEN = -1
_Kind = TypeVar("_Kind", bound=np.generic)


class Rows:
    """Columns over `num` rows, which lie together at the front. A row is one completion of a `Group`."""

    def __init__(self, capacity: int, device: torch.device, stop_strings: StopStrings) -> None:
        self.num = 0
        self._device, self._stop_strings = device, stop_strings
        self.groups: list[Group] = []
        self._indices: list[int] = []
        self._segments: list[list[VersionSegment]] = []
        self.prompt_length = np.zeros(capacity, np.int64)
        self.count = np.zeros(capacity, np.int64)  # tokens sampled
        self.limit = np.zeros(capacity, np.int64)  # and at most
        self.last_token = np.zeros(capacity, np.int64)
        self._seed = np.zeros(capacity, np.uint64)
        self._temperature = np.ones(capacity, np.float32)
        self._is_greedy = np.zeros(capacity, np.bool_)
        self._top_p = np.ones(capacity, np.float32)
        self._top_k = np.zeros(capacity, np.int64)
        self._has_stop_strings = np.zeros(capacity, np.bool_)
        self._stop_ids: NDArray[np.int64] = np.full((capacity, 1), _NO_TOKEN, np.int64)
        self._tokens: NDArray[np.int32] = np.zeros((capacity, 64), np.int32)
        self._logprobs: NDArray[np.float32] = np.zeros((capacity, 64), np.float32)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Where each row's last token stands, `[n]`."""
        return (self.prompt_length + self.count)[: self.num] - 1

    @property
    def longest(self) -> int:
        """No row will have more tokens than this, prompt included."""
        return int((self.prompt_length + self.limit)[: self.num].max(initial=0))

    def add(self, group: Group, count: int, limit: int, eos_ids: Sequence[int], version: int) -> None:
        """The next `count` seeds of `group`, none of them with a token yet; each gets at most `limit` tokens."""
        new = slice(self.num, self.num + count)
        sampling = group.request.sampling
        first, self.num = group.num_started, self.num + count
        self.groups += [group] * count
        self._indices += range(first, first + count)
        self._segments += [[VersionSegment(0, version)] for _ in range(count)]
        self.prompt_length[new], self.count[new], self.limit[new] = group.prompt_length, 0, limit
        self._seed[new] = [seed % 2**64 for seed in group.request.seeds[first : first + count]]
        self._is_greedy[new] = sampling.temperature == 0
        self._temperature[new] = sampling.temperature or 1.0
        self._top_p[new], self._top_k[new] = sampling.top_p, sampling.top_k
        self._has_stop_strings[new] = bool(sampling.stop)
        stops = sorted({*sampling.stop_token_ids, *eos_ids})
        if len(stops) > self._stop_ids.shape[1]:
            self._stop_ids = _widened(self._stop_ids, len(stops), _NO_TOKEN)
        self._stop_ids[new] = _NO_TOKEN
        self._stop_ids[new, : len(stops)] = stops
        group.num_started += count

    def sampling(self, start: int, stop: int) -> tuple[SamplingRows, Tensor]:
        """How rows `start` to `stop` are sampled, and the uniform number of each one's next token."""
        rows = slice(start, stop)
        temperature, is_greedy = self._temperature[rows], self._is_greedy[rows]
        filters = (self._top_p[rows] < 1) | (self._top_k[rows] > 0)
        found = filters.nonzero()[0] if filters.any() else None
        how = SamplingRows(
            temperature=self._send(temperature) if (temperature != 1).any() else None,
            is_greedy=self._send(is_greedy) if is_greedy.any() else None,
            filtered=None if found is None else self._send(found),
            top_p=None if found is None else self._send(self._top_p[rows][found]),
            top_k=None if found is None else self._send(self._top_k[rows][found]),
        )
        return how, self._send(uniforms(self._seed[rows], self.count[rows]))

    def _send(self, column: NDArray[Any]) -> Tensor:
        return torch.from_numpy(column).to(self._device)

    def record(self, start: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> dict[int, FinishReason]:
        """Takes the next token of the rows from `start` on. Returns the rows that have ended, and why."""
        rows = slice(start, start + len(tokens))
        count = self.count[rows]
        if (width := int(count.max(initial=0))) >= self._tokens.shape[1]:
            self._tokens, self._logprobs = _widened(self._tokens, 2 * width, 0), _widened(self._logprobs, 2 * width, 0)
        at = np.arange(rows.start, rows.stop)
        self._tokens[at, count], self._logprobs[at, count] = tokens, logprobs
        self.count[rows] += 1
        self.last_token[rows] = tokens
        has_stopped = (tokens[:, None] == self._stop_ids[rows]).any(1)
        if self._has_stop_strings[rows].any():
            has_stopped[self._found_stop_strings(start, ~has_stopped & self._has_stop_strings[rows])] = True
        is_full = count >= self.limit[rows]  # a view, already counted up
        return {
            start + int(row): FinishReason.STOP if has_stopped[row] else FinishReason.LENGTH
            for row in (has_stopped | is_full).nonzero()[0]
        }

    def _found_stop_strings(self, start: int, candidates: NDArray[np.bool_]) -> list[int]:
        offsets = candidates.nonzero()[0].tolist()
        stops = [self.groups[start + i].request.sampling.stop for i in offsets]
        tails = []
        for i, wanted in zip(offsets, stops, strict=True):
            end = int(self.count[start + i])
            tails.append(self._tokens[start + i, max(0, end - self._stop_strings.window(wanted)) : end].tolist())
        found = self._stop_strings.found(tails, stops) if offsets else []
        return [i for i, is_found in zip(offsets, found, strict=True) if is_found]

    def completion(self, row: int, reason: FinishReason) -> tuple[Group, int, Completion]:
        """What the row has come to, and whose it is: its group and the index of its seed there."""
        end = int(self.count[row])
        segments = [segment for segment in self._segments[row] if segment.start < end]
        completion = Completion(self._tokens[row, :end].copy(), self._logprobs[row, :end].copy(), tuple(segments), reason)
        return self.groups[row], self._indices[row], completion

    def remove(self, gone: set[int]) -> tuple[list[int], list[int]]:
        """Takes rows out; the last ones move into the holes. Returns which rows moved, and where to."""
        left = self.num - len(gone)
        targets = sorted(row for row in gone if row < left)
        sources = [row for row in range(left, self.num) if row not in gone]
        lists: tuple[list[Any], ...] = (self.groups, self._indices, self._segments)
        for source, target in zip(sources, targets, strict=True):
            for listed in lists:
                listed[target] = listed[source]
        for column in self._columns():
            column[targets] = column[sources]
        for listed in lists:
            del listed[left:]
        self.num = left
        return sources, targets

    def _columns(self) -> tuple[NDArray[Any], ...]:
        one = (self.prompt_length, self.count, self.limit, self.last_token, self._seed, self._temperature, self._is_greedy)
        return (*one, self._top_p, self._top_k, self._has_stop_strings, self._stop_ids, self._tokens, self._logprobs)

    def change_version(self, version: int) -> None:
        """What is sampled from now on is of `version`."""
        for row, segments in enumerate(self._segments):
            if segments[-1].version != version:
                segments.append(VersionSegment(int(self.count[row]), version))


def _widened(column: NDArray[_Kind], width: int, filler: int) -> NDArray[_Kind]:
    wider = np.full((len(column), width), filler, column.dtype)
    wider[:, : column.shape[1]] = column
    return wider
