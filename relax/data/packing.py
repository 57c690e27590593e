"""From samples to micro-batches: flat tokens under a budget, the prompt of a group once, nothing padded, nothing needless.

Budget and balance go by what passes cost, in tokens: those that are laid out, and the encoders' work on a group's media.

    group:   prompt  -> sample 0's own tokens
                     -> sample 1's own tokens      the flat order is prompt, then each sample's own tokens
                     -> ...

What a group shares is the longest common beginning that no sample trains on. A sample's tokens end before its last trained one:
that token is predicted, but predicts nothing. Samples without trained tokens are left out altogether. Every trained token has a
source, the place of the token before it: for the first of a sample that is the last place of the shared prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from relax.types import Ragged

Ints = NDArray[np.int64]
_NO_MEDIA: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample's own tokens: `tokens[start:end]` of row `row` are inputs, to the last trained position or the row's end."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Group:
    """A shared beginning of `prefix` tokens (those of the first segment's row), and the samples that go on from it.

    `media`: what encoding the group's media costs, in tokens (`data/media/cost.py`).
    """

    prefix: int
    segments: tuple[Segment, ...]
    media: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(s.end - s.start for s in self.segments)

    @property
    def cost(self) -> float:
        """Of a pass, in tokens."""
        return self.media + self.num_tokens


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


def find_groups(
    tokens: Ragged, loss_mask: Ragged, group_ids: Ints, media_costs: Mapping[int, float] = _NO_MEDIA
) -> list[Group]:
    """The groups of a batch, in the order of their first rows. Rows of a group need not be next to one another.

    `media_costs`: of encoding their media, by the ids of those that have any.
    """
    members: dict[int, list[tuple[int, int, int]]] = {}
    for row, group in enumerate(group_ids.tolist()):
        trained = np.flatnonzero(loss_mask[row])
        if len(trained):
            assert trained[0] > 0, f"row {row}: entry 0 has nothing before it that could predict it, mask it"
            members.setdefault(group, []).append((row, int(trained[0]), int(trained[-1])))
    groups = []
    for group, rows in members.items():
        if group in media_costs and len(rows) == 1:  # media may come after what is trained, and their tokens have to be there
            rows = [(row, first, len(tokens[row])) for row, first, _ in rows]
        prefix = _common_prefix([tokens[row][:first] for row, first, _ in rows])
        segments = tuple(Segment(row, prefix, last) for row, _, last in rows)
        groups.append(Group(prefix, segments, media_costs.get(group, 0.0)))
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
    """Whole groups in order, in as few micro-batches of a cost under `max_tokens` as that order allows, and about equally dear.

    A group with more tokens is divided between its samples, its prefix repeated, unless `divides` is off: not one whose media
    are dear, which would be encoded again. What is still over the budget stands alone.
    """
    pieces = [piece for group in groups for piece in _divide(group, max_tokens)] if divides else groups
    total = sum(piece.cost for piece in pieces)
    count = max(1, ceil(total / max_tokens))
    plans: list[list[Group]] = []
    cost, done = 0.0, 0.0
    for piece in pieces:
        full = bool(plans) and (cost + piece.cost > max_tokens or done * count >= total * len(plans))
        if not plans or full:
            plans.append([])
            cost = 0.0
        plans[-1].append(piece)
        cost += piece.cost
        done += piece.cost
    return plans


def _divide(group: Group, max_tokens: int) -> Iterator[Group]:
    segments: list[Segment] = []
    size = group.prefix
    for segment in group.segments:
        length = segment.end - segment.start
        if segments and size + length > max_tokens:
            yield replace(group, segments=tuple(segments))
            segments, size = [], group.prefix
        segments.append(segment)
        size += length
    yield replace(group, segments=tuple(segments))


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
