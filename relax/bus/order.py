"""Issues in the order of their numbers, for claims that may not skip one."""

import heapq
from collections.abc import Callable, Iterable


class IssueOrder:
    """A heap of issues that wait for a place in a step. Entries that are not live any more are skipped when they are met."""

    def __init__(self, issues: Iterable[int] = ()) -> None:
        self._heap = sorted(issues)

    def push(self, issue: int) -> None:
        heapq.heappush(self._heap, issue)

    def head(self, is_live: Callable[[int], bool]) -> int | None:
        """The lowest live issue, which stays."""
        while self._heap and not is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> None:
        """The issue that `head` returned goes."""
        heapq.heappop(self._heap)

    def clear(self) -> None:
        self._heap.clear()
