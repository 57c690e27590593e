"""The rows of the batch that is being decoded, as columns: what a step does to all of them is done at once."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax.engines.groups import Branch, Group
from relax.engines.sampling import SamplingRows, uniforms
from relax.engines.stopping import StopStrings
from relax.types import Completion, FinishReason, VersionSegment

_NO_TOKEN = -1
_Kind = TypeVar("_Kind", bound=np.generic)


class Rows:
    """Columns over `num` rows, which lie together at the front. A row is one completion of a `Group`.

    With `replays` a continued row passes its old tokens again, one a step, before it samples new ones.
    """

    def __init__(self, capacity: int, device: torch.device, stop_strings: StopStrings, *, replays: bool) -> None:
        self.num = 0
        self._device, self._stop_strings, self._replays = device, stop_strings, replays
        self.groups: list[Group] = []
        self._indices: list[int] = []
        self._segments: list[list[VersionSegment]] = []
        self.heard: list[Any] = []  # what each attends to beside its tokens: like those, it stays when weights change
        self.prompt_length = np.zeros(capacity, np.int64)
        self.count = np.zeros(capacity, np.int64)  # tokens that have passed
        self._num_known = np.zeros(capacity, np.int64)  # tokens that were there when the request came
        self.limit = np.zeros(capacity, np.int64)  # and at most
        self.delta = np.zeros(capacity, np.float32)  # between a token's place among tokens and that which the model sees
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
    def seen_positions(self) -> NDArray[np.float32]:
        """Where it stands to a model that sees: an image's tokens share a few places. `[n]`."""
        return self.positions.astype(np.float32) + self.delta[: self.num]

    @property
    def longest(self) -> int:
        """No row will have more tokens than this, prompt included."""
        return int((self.prompt_length + self.limit)[: self.num].max(initial=0))

    def add(self, branch: Branch, count: int, limit: int, eos_ids: Sequence[int], version: int) -> None:
        """The next `count` seeds of `branch`; each gets at most `limit` tokens, those that are there included."""
        new = slice(self.num, self.num + count)
        request = branch.group.request
        sampling, indices = request.sampling, branch.waiting[:count]
        self.num += count
        branch.num_started += count
        self.groups += [branch.group] * count
        self.heard += [branch.group.media and branch.group.media.heard] * count
        self._indices += indices
        self.prompt_length[new], self.limit[new] = len(request.prompt_ids), limit
        self.delta[new] = branch.group.media.delta if branch.group.media else 0.0
        self._seed[new] = [request.seeds[index] % 2**64 for index in indices]
        self._is_greedy[new] = sampling.temperature == 0
        self._temperature[new] = sampling.temperature or 1.0
        self._top_p[new], self._top_k[new] = sampling.top_p, sampling.top_k
        self._has_stop_strings[new] = bool(sampling.stop)
        stops = sorted({*sampling.stop_token_ids, *eos_ids})
        if len(stops) > self._stop_ids.shape[1]:
            self._stop_ids = _widened(self._stop_ids, len(stops), _NO_TOKEN)
        self._stop_ids[new] = _NO_TOKEN
        self._stop_ids[new, : len(stops)] = stops
        self.count[new], self._num_known[new] = 0, 0
        if request.partials:
            for row, index in enumerate(indices, new.start):
                self._continue(row, branch.group.known(index), version)
        else:
            self._segments += [[VersionSegment(0, version)] for _ in range(count)]

    def _continue(self, row: int, known: Completion, version: int) -> None:
        num = len(known.token_ids)
        self._make_room(num)
        self._tokens[row, :num], self._logprobs[row, :num] = known.token_ids, known.logprobs
        self._num_known[row] = num
        self.count[row] = 0 if self._replays else num
        segments = list(known.versions)
        if not segments or segments[-1].version != version:
            segments.append(VersionSegment(num, version))
        self._segments.append(segments)

    def _make_room(self, width: int) -> None:
        """For one token more than `width` in each row."""
        if width >= self._tokens.shape[1]:
            self._tokens, self._logprobs = _widened(self._tokens, 2 * width, 0), _widened(self._logprobs, 2 * width, 0)

    def num_new(self, start: int, stop: int) -> int:
        """How many of these rows sample their next token, and do not replay it."""
        return int((self.count[start:stop] >= self._num_known[start:stop]).sum())

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
        self._make_room(int(count.max(initial=0)))
        at = np.arange(rows.start, rows.stop)
        is_old = count < self._num_known[rows]
        if is_old.any():
            tokens = np.where(is_old, self._tokens[at, count], tokens)
            logprobs = np.where(is_old, self._logprobs[at, count], logprobs)
        self._tokens[at, count], self._logprobs[at, count] = tokens, logprobs
        self.count[rows] += 1
        self.last_token[rows] = tokens
        has_stopped = (tokens[:, None] == self._stop_ids[rows]).any(1) & ~is_old
        if self._has_stop_strings[rows].any():
            has_stopped[self._found_stop_strings(start, ~has_stopped & ~is_old & self._has_stop_strings[rows])] = True
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
        end = self._num_there(row)
        segments = [segment for segment in self._segments[row] if segment.start < end]
        completion = Completion(self._tokens[row, :end].copy(), self._logprobs[row, :end].copy(), tuple(segments), reason)
        return self.groups[row], self._indices[row], completion

    def _num_there(self, row: int) -> int:
        """Tokens of a row's completion, those included that it has yet to replay."""
        return int(max(self.count[row], self._num_known[row]))

    def remove(self, gone: set[int]) -> tuple[list[int], list[int]]:
        """Takes rows out; the last ones move into the holes. Returns which rows moved, and where to."""
        left = self.num - len(gone)
        targets = sorted(row for row in gone if row < left)
        sources = [row for row in range(left, self.num) if row not in gone]
        lists: tuple[list[Any], ...] = (self.groups, self._indices, self._segments, self.heard)
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
        one = (self.prompt_length, self.count, self._num_known, self.limit, self.last_token, self._seed, self._temperature)
        return (
            *one,
            self._is_greedy,
            self._top_p,
            self._top_k,
            self._has_stop_strings,
            self._stop_ids,
            self._tokens,
            self._logprobs,
            self.delta,
        )

    def change_version(self, version: int) -> None:
        """What is sampled from now on is of `version`."""
        for row, segments in enumerate(self._segments):
            start = self._num_there(row)
            if segments[-1].version != version and segments[-1].start == start:
                segments.pop()  # no token was sampled under it
            if not segments or segments[-1].version != version:
                segments.append(VersionSegment(start, version))


def _widened(column: NDArray[_Kind], width: int, filler: int) -> NDArray[_Kind]:
    wider = np.full((len(column), width), filler, column.dtype)
    wider[:, : column.shape[1]] = column
    return wider
