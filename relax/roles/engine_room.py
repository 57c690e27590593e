"""How much of the engines' room stands empty because the prompts that would fill it wait for their media."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class EngineRoom:
    """Counts groups while they wait for media and while engines have them. `num_groups`: so many fill the engines.

    `starved_s`: seconds, each weighted with the share of what engines could have in hand that waits instead: 1 where nothing
    but waiting prompts is there, 0 where engines are full or nobody waits.
    """

    def __init__(self, num_groups: float, now: Callable[[], float]) -> None:
        self._num_groups, self._now = num_groups, now
        self._num_waiting = self._num_working = 0
        self._total_s, self._since = 0.0, now()

    @property
    def starved_s(self) -> float:
        self._settle()
        return self._total_s

    def waiting(self) -> AbstractContextManager[None]:
        """A group's media are waited for."""
        return self._counted(num_waiting=1)

    def working(self) -> AbstractContextManager[None]:
        """Engines have a group in hand."""
        return self._counted(num_working=1)

    @contextmanager
    def _counted(self, num_waiting: int = 0, num_working: int = 0) -> Iterator[None]:
        self._change(num_waiting, num_working)
        try:
            yield
        finally:
            self._change(-num_waiting, -num_working)

    def _change(self, num_waiting: int, num_working: int) -> None:
        self._settle()
        self._num_waiting += num_waiting
        self._num_working += num_working

    def _settle(self) -> None:
        """Counts the time since the last change."""
        now = self._now()
        could = min(self._num_groups, self._num_waiting + self._num_working)
        if could:
            self._total_s += (now - self._since) * (could - min(could, self._num_working)) / could
        self._since = now
