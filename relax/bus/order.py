"""Issues in the order of their numbers, for claims that may not skip one."""

import heapq
from collections.abc import Callable, Iterable


class IssueOrder:
    """A heap of issues that wait for a place in a step, each once. Those that are not live any more are skipped when met."""

    def __init__(self, issues: Iterable[int] = ()) -> None:
        self._heap = sorted(set(issues))
        self._there = set(self._heap)

    def push(self, issue: int) -> None:
        """Does nothing for an issue that waits already: one that is given again, after its producer's end, never left."""
        if issue not in self._there:
            self._there.add(issue)
            heapq.heappush(self._heap, issue)

    def head(self, is_live: Callable[[int], bool]) -> int | None:
        """The lowest live issue, which stays."""
        while self._heap and not is_live(self._heap[0]):
            self.pop()
        return self._heap[0] if self._heap else None

    def pop(self) -> None:
        """The issue that `head` returned goes."""
        self._there.discard(heapq.heappop(self._heap))

    def clear(self) -> None:
        self._heap.clear()
        self._there.clear()
