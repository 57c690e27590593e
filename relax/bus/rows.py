"""The groups that are in the queue: put once, columns written once, freed when the last task is done with them."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from relax.bus.columns import is_same, join, num_bytes, slice_rows, take_rows
from relax.bus.groups import Group, RowIds
from relax.bus.schema import PER_TOKEN, Content, Schema, check_lengths, token_lengths
from relax.data.media.cost import RowCosts, media_cost
from relax.data.packing import find_groups
from relax.errors import BusError, StaleHandle
from relax.types import Column, Ragged

_MAX_REMEMBERED = 1 << 16  # groups that are gone, of which a repeated put still gets the row ids


class Rows:
    """Live groups by issue, and their bytes."""

    def __init__(self, ids: RowIds, max_bytes: int, schema: Schema, row_costs: RowCosts) -> None:
        self.ids, self.max_bytes, self.schema, self._row_costs = ids, max_bytes, schema, row_costs
        self.groups: dict[int, Group] = {}
        self.num_bytes = 0
        self.reserved: dict[int, int] = {}  # issue -> bytes promised to a put that is under way
        self.num_rewrites_ignored = self.num_late_rows = 0
        self._gone: OrderedDict[int, int] = OrderedDict()  # issue -> number of rows

    def ids_of(self, issue: int) -> list[int] | None:
        """Row ids of an issue that was put before, also when its rows are gone."""
        group = self.groups.get(issue)
        num_put = group.num_put if group is not None else self._gone.get(issue)
        return None if num_put is None else self.ids.make(issue, num_put)

    def has_room(self, size: int) -> bool:
        return self.num_bytes + sum(self.reserved.values()) + size <= self.max_bytes

    def add(self, issue: int, content: Content, version: int, due: int) -> Group:
        """Adds a checked group."""
        columns, shared, num_rows, size = content
        row_ids = tuple(self.ids.make(issue, num_rows))
        self.reserved.pop(issue, None)
        self.schema.learn(columns)
        group = Group(issue, version, due, row_ids, num_rows, columns, size, shared)
        self.groups[issue] = group
        self.num_bytes += size
        return group

    def remove(self, group: Group) -> None:
        """The group is gone; a lease that is still out keeps its arrays alive until it ends."""
        del self.groups[group.issue]
        self.num_bytes -= group.num_bytes
        self._gone[group.issue] = group.num_put
        if len(self._gone) > _MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def has(self, row_id: int) -> bool:
        """Whether the row is in the queue; raises `StaleHandle` for ids of another incarnation."""
        group = self.groups.get(self.ids.issue_of(row_id))
        return group is not None and _position(group, row_id) is not None

    def find(self, row_ids: Sequence[int]) -> list[tuple[Group, list[int]]]:
        """(group, positions in it) in the order of `row_ids`; raises `StaleHandle` for rows that are gone."""
        found: list[tuple[Group, list[int]]] = []
        seen: set[int] = set()
        for row_id in row_ids:
            group = self.groups.get(self.ids.issue_of(row_id))
            position = None if group is None else _position(group, row_id)
            if group is None or position is None:
                raise StaleHandle(f"row {row_id} (group {self.ids.issue_of(row_id)}) is gone: trained or dropped")
            if row_id in seen:
                raise BusError(f"row {row_id} is named twice")
            seen.add(row_id)
            if not found or found[-1][0] is not group:
                found.append((group, []))
            found[-1][1].append(position)
        return found

    def write(self, row_ids: Sequence[int], columns: Mapping[str, Column]) -> list[Group]:
        """Adds columns; returns the groups in which one became complete. Nothing is changed when anything is refused."""
        checked, count, _ = self.schema.check("write", columns)
        if count != len(row_ids):
            raise BusError(f"write: {len(row_ids)} rows, but the columns have {count}")
        found = self.find(row_ids)
        writes: list[tuple[Group, list[int], str, Column]] = []
        start = 0
        for group, positions in found:
            lengths = token_lengths(group.columns["tokens"])[positions]
            for name, column in checked.items():
                piece = slice_rows(column, start, start + len(positions))
                if name in PER_TOKEN:
                    check_lengths(f"write to group {group.issue}", name, piece, lengths)
                if self._is_news(group, positions, name, piece):
                    writes.append((group, positions, name, piece))
            start += len(positions)
        self.schema.learn(checked)
        completed = [group for group, positions, name, piece in writes if self._store(group, positions, name, piece)]
        return list(dict.fromkeys(completed))

    def _is_news(self, group: Group, positions: list[int], name: str, piece: Column) -> bool:
        if name in group.columns:
            before: list[Column | None] = [take_rows(group.columns[name], positions)]
            pieces = [piece]
        elif name in group.parts:
            before = [group.parts[name][position] for position in positions]
            pieces = [slice_rows(piece, index, index + 1) for index in range(len(positions))]
        else:
            return True
        if any(old is not None and not is_same(old, new) for old, new in zip(before, pieces, strict=True)):
            if not group.returned:
                raise BusError(
                    f"group {group.issue}: column {name!r} is written already, with other values; a column is written once"
                )
            self.num_rewrites_ignored += 1  # a consumer died after its write: the first write stays, as others may have read it
            return False
        return any(old is None for old in before)

    def _store(self, group: Group, positions: list[int], name: str, piece: Column) -> bool:
        if len(positions) == len(group.row_ids) and positions == list(range(len(positions))):
            group.parts.pop(name, None)
            complete = piece
        else:
            parts = group.parts.setdefault(name, [None] * len(group.row_ids))
            for index, position in enumerate(positions):
                if parts[position] is None:
                    parts[position] = slice_rows(piece, index, index + 1)
            if any(part is None for part in parts):
                return False
            complete = join(group.parts.pop(name))
        self._complete(group, name, complete)
        return True

    def _complete(self, group: Group, name: str, column: Column) -> None:
        group.columns[name] = column
        size = num_bytes(column)
        group.num_bytes += size
        self.num_bytes += size

    def shrink(self, group: Group, positions: Sequence[int]) -> None:
        """Removes some rows of a group, not all. Arrays are copied, so that what is left out is freed."""
        gone = set(positions)
        kept = [row for row in range(len(group.row_ids)) if row not in gone]
        self.num_bytes -= group.num_bytes
        group.row_ids = tuple(group.row_ids[row] for row in kept)
        group.columns = {name: take_rows(column, kept) for name, column in group.columns.items()}
        group.num_bytes = sum(num_bytes(column) for column in group.columns.values()) + group.num_shared_bytes
        self.num_bytes += group.num_bytes
        for name, parts in list(group.parts.items()):
            group.parts[name] = [parts[row] for row in kept]
            if all(part is not None for part in group.parts[name]):  # the rows without it are those that went
                self._complete(group, name, join(group.parts.pop(name)))

    def cost(self, group: Group) -> float:
        """Of training on the group, in tokens: its prompt and media count once, tokens that predict nothing do not."""
        tokens, mask = group.columns["tokens"], group.columns.get("loss_mask")
        media = media_cost(group.shared, self._row_costs)
        if not isinstance(tokens, Ragged) or not isinstance(mask, Ragged):
            return media + float(token_lengths(tokens).sum())
        one = np.zeros(len(tokens), np.int64)
        return sum(packed.cost for packed in find_groups(tokens, mask, one, {0: media} if group.shared else {}))


def _position(group: Group, row_id: int) -> int | None:
    position = bisect_left(group.row_ids, row_id)
    return position if position < len(group.row_ids) and group.row_ids[position] == row_id else None
