"""Which groups a claim gets: whole groups, oldest first, and the shards of all ranks of one claim at once.

Ready sets are kept up to date as columns arrive; a claim looks at the heads of a few heaps, never at the rows.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence

from relax.bus.groups import Group


class ReadyIndex:
    """Groups that have all of `columns` and that the task has not had: by due step, within it by issue. O(log n) an event."""

    def __init__(self, columns: Iterable[str]) -> None:
        self.columns = frozenset(columns)
        self.ready: dict[int, Group] = {}
        self._heaps: dict[int, list[int]] = {}  # due step -> issues; entries that are no longer ready are skipped when met
        self._num_entries = 0
        self.operations = 0  # heap entries touched; tests bound it

    def __len__(self) -> int:
        return len(self.ready)

    def update(self, group: Group) -> bool:
        """Call when a group came, came back or got a column; true when it has become ready."""
        if group.issue in self.ready or not self.columns <= group.columns.keys():
            return False
        self.ready[group.issue] = group
        heapq.heappush(self._heaps.setdefault(group.due, []), group.issue)
        self._num_entries += 1
        self.operations += 1
        if self._num_entries > 2 * len(self.ready) + 64:
            self._rebuild()
        return True

    def discard(self, issue: int) -> None:
        self.ready.pop(issue, None)

    def take(self, most: int, may_take: Callable[[int], bool]) -> list[Group]:
        """Up to `most` groups, oldest first. `may_take(due)` is asked for each, just before it is taken."""
        taken: list[Group] = []
        for due in sorted(self._heaps):
            heap = self._heaps[due]
            while heap and len(taken) < most:
                self.operations += 1
                group = self.ready.get(heap[0])
                if group is not None and not may_take(due):
                    break
                heapq.heappop(heap)
                self._num_entries -= 1
                if group is not None:
                    del self.ready[group.issue]
                    taken.append(group)
            if not heap:
                del self._heaps[due]
        return taken

    def _rebuild(self) -> None:
        self._heaps = {}
        for issue, group in self.ready.items():
            self._heaps.setdefault(group.due, []).append(issue)
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._num_entries = len(self.ready)


def shards(groups: Sequence[Group], num_ranks: int, cost: Callable[[Group], float]) -> list[list[Group]]:
    """Splits whole groups over ranks: counts differ by at most one, costs are balanced, deterministic.

    Dearest first onto the rank with the least work that still has room (Graham 1969); each shard in row-id order.
    """
    result: list[list[Group]] = [[] for _ in range(num_ranks)]
    if num_ranks == 1:
        result[0] = list(groups)
    else:
        loads = [0.0] * num_ranks
        least, extra = divmod(len(groups), num_ranks)
        costs = {group.issue: cost(group) for group in groups}
        for group in sorted(groups, key=lambda g: (-costs[g.issue], g.issue)):
            full = sum(len(shard) > least for shard in result)
            open_ranks = [r for r in range(num_ranks) if len(result[r]) < least or (len(result[r]) == least and full < extra)]
            rank = min(open_ranks, key=lambda r: (loads[r], r))
            result[rank].append(group)
            loads[rank] += costs[group.issue]
    for shard in result:
        shard.sort(key=lambda g: g.row_ids[0])
    return result
