"""From samples to micro-batches: flat tokens under a budget, the prompt of a group once, nothing padded, nothing needless.

    group:   prompt  -> sample 0's own tokens
                     -> sample 1's own tokens      the flat order is prompt, then each sample's own tokens
                     -> ...

What a group shares is the longest common beginning that no sample trains on. A sample's tokens end before its last trained one:
that token is predicted, but predicts nothing. Samples without trained tokens are left out altogether. Every trained token has a
source, the place of the token before it: for the first of a sample that is the last place of the shared prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax.types import Ragged

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample's own tokens: `tokens[start:end]` of row `row` are inputs, `end` is the last trained position."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Group:
    """A shared beginning of `prefix` tokens (those of the first segment's row), and the samples that go on from it."""

    prefix: int
    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(s.end - s.start for s in self.segments)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T flat tokens of G groups and R samples, of which S tokens are trained. All int64.

    `ids [T]`, `positions [T]` (place of a token in its sample); `prefix_starts [G]`, `prefix_lengths [G]`; `starts [R]`,
    `lengths [R]` of each sample's own tokens, `groups [R]` its group here, `rows [R]` its row in the batch; `sources [S]` the
    place whose hidden state predicts the token, `targets [S]` the token's index in the batch's flat values, `target_ids [S]`
    the token itself, `samples [S]` its sample here, in order.
    """

    ids: Ints
    positions: Ints
    prefix_starts: Ints
    prefix_lengths: Ints
    starts: Ints
    lengths: Ints
    groups: Ints
    rows: Ints
    sources: Ints
    targets: Ints
    target_ids: Ints
    samples: Ints


def find_groups(tokens: Ragged, loss_mask: Ragged, group_ids: Ints) -> list[Group]:
    """The groups of a batch, in the order of their first rows. Rows of a group need not be next to one another."""
    members: dict[int, list[tuple[int, int, int]]] = {}
    for row, group in enumerate(group_ids.tolist()):
        trained = np.flatnonzero(loss_mask[row])
        if len(trained):
            assert trained[0] > 0, f"row {row}: entry 0 has nothing before it that could predict it, mask it"
            members.setdefault(group, []).append((row, int(trained[0]), int(trained[-1])))
    groups = []
    for rows in members.values():
        prefix = _common_prefix([tokens[row][:first] for row, first, _ in rows])
        groups.append(Group(prefix, tuple(Segment(row, prefix, last) for row, _, last in rows)))
    return groups


def _common_prefix(rows: Sequence[NDArray[np.integer]]) -> int:
    length = min(len(row) for row in rows)
    first = rows[0][:length]
    for row in rows[1:]:
        differs = np.flatnonzero(first != row[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


def plan(groups: Sequence[Group], max_tokens: int, *, divides: bool = True) -> list[list[Group]]:
    """Whole groups in order, in as few micro-batches under `max_tokens` as that order allows, and of about equal size.

    A group over the budget is divided between its samples, its prefix repeated, unless `divides` is off; what is still over it
    stands alone.
    """
    pieces = [piece for group in groups for piece in _divide(group, max_tokens)] if divides else groups
    total = sum(piece.num_tokens for piece in pieces)
    count = max(1, -(-total // max_tokens))
    plans: list[list[Group]] = []
    size, done = 0, 0
    for piece in pieces:
        full = bool(plans) and (size + piece.num_tokens > max_tokens or done * count >= total * len(plans))
        if not plans or full:
            plans.append([])
            size = 0
        plans[-1].append(piece)
        size += piece.num_tokens
        done += piece.num_tokens
    return plans


def _divide(group: Group, max_tokens: int) -> Iterator[Group]:
    segments: list[Segment] = []
    size = group.prefix
    for segment in group.segments:
        length = segment.end - segment.start
        if segments and size + length > max_tokens:
            yield Group(group.prefix, tuple(segments))
            segments, size = [], group.prefix
        segments.append(segment)
        size += length
    yield Group(group.prefix, tuple(segments))


def pack(tokens: Ragged, loss_mask: Ragged, groups: Sequence[Group]) -> MicroBatch:
    """Lays `groups` out flat."""
    spans: list[tuple[int, int, int]] = []  # (row, first, end) of what is laid out, in order
    prefix_starts, starts, owner = [], [], []
    place = 0
    for index, group in enumerate(groups):
        prefix_starts.append(place)
        spans.append((group.segments[0].row, 0, group.prefix))
        place += group.prefix
        for segment in group.segments:
            starts.append(place)
            owner.append(index)
            spans.append((segment.row, segment.start, segment.end))
            place += segment.end - segment.start
    segments = [segment for group in groups for segment in group.segments]
    offsets = tokens.offsets
    firsts = _int([offsets[row] + first for row, first, _ in spans])
    lengths = _int([end - first for _, first, end in spans])
    values = ranges(firsts, lengths)
    positions = ranges(_int([first for _, first, _ in spans]), lengths)
    sources, targets, samples = _trained(loss_mask, groups, segments, _int(prefix_starts), _int(starts), _int(owner))
    return MicroBatch(
        ids=tokens.values[values].astype(np.int64),
        positions=positions,
        prefix_starts=_int(prefix_starts),
        prefix_lengths=_int([group.prefix for group in groups]),
        starts=_int(starts),
        lengths=_int([segment.end - segment.start for segment in segments]),
        groups=_int(owner),
        rows=_int([segment.row for segment in segments]),
        sources=sources,
        targets=targets,
        target_ids=tokens.values[targets].astype(np.int64),
        samples=samples,
    )


def _trained(
    loss_mask: Ragged, groups: Sequence[Group], segments: Sequence[Segment], prefix_starts: Ints, starts: Ints, owner: Ints
) -> tuple[Ints, Ints, Ints]:
    sources: list[Ints] = []
    targets: list[Ints] = []
    samples: list[Ints] = []
    for index, segment in enumerate(segments):
        trained: Ints = np.flatnonzero(loss_mask[segment.row][: segment.end + 1]).astype(np.int64)
        places: Ints = trained + (starts[index] - segment.start - 1)
        if trained[0] == segment.start:
            places[0] = prefix_starts[owner[index]] + groups[owner[index]].prefix - 1
        sources.append(places)
        targets.append(loss_mask.offsets[segment.row] + trained)
        samples.append(np.full(len(trained), index, np.int64))
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(samples)


def _int(values: Sequence[int]) -> Ints:
    return np.asarray(values, np.int64)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """`arange(start, start + length)` of each pair, end to end."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
