"""How each role, engine and the queue is doing, how often it may be restarted, and what its status says is wrong.

ok --failure--> restarting --it runs again--> ok
                    '--budget used up--> failed, with the first error of the row
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from relax.clock import Clock, MonotonicClock
from relax.config.services import ServicesConfig

State = Literal["ok", "restarting", "failed"]
Kind = Literal["user", "crash", "bus", "dead", "silent", "queue", "ray"]

_LONGEST_PAUSE_S = 30.0
_RUNTIME = ("queue", "ray")


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that does not work any more.

    `kind`: "user" (another attempt would end in the same way), "crash" (it raised), "bus" (it lost the queue), "dead" (its
    process), "silent" (it does not answer); "queue" and "ray" are what all others need.
    """

    name: str
    cause: str
    kind: Kind

    @property
    def is_of_runtime(self) -> bool:
        """Whether everything has to be started again."""
        return self.kind in _RUNTIME


@dataclass(slots=True)
class _Part:
    state: State = "ok"
    times: list[float] = field(default_factory=list)  # of the failures in a row
    first: str = ""


class Health:
    """State and budget by name. Failures that lie `restart_memory_s` apart do not belong to one row.

    `num_failures` and `num_restarts`: of everything, since the start.
    """

    def __init__(self, services: ServicesConfig, clock: Clock | None = None) -> None:
        self._services, self._clock = services, clock or MonotonicClock()
        self._parts: dict[str, _Part] = {}
        self.num_failures = 0
        self.num_restarts = 0

    def state(self, name: str) -> State:
        return self._part(name).state

    def attempt(self, name: str) -> int:
        """How many failures in a row there have been."""
        return len(self._part(name).times)

    def first_error(self, name: str) -> str:
        """The cause of the first failure of the row."""
        return self._part(name).first

    def restarting(self) -> list[str]:
        return [name for name, part in self._parts.items() if part.state == "restarting"]

    def failed(self, name: str, cause: str) -> float | None:
        """Counts a failure: seconds to wait before the restart, or `None` when there have been too many in a row."""
        part, now = self._part(name), self._clock.now()
        if part.times and now - part.times[-1] > self._services.restart_memory_s:
            part.times.clear()
        if not part.times:
            part.first = cause
        part.times.append(now)
        self.num_failures += 1
        if len(part.times) > self._services.max_restarts:
            part.state = "failed"
            return None
        part.state = "restarting"
        again = len(part.times) - 2
        return 0.0 if again < 0 else min(_LONGEST_PAUSE_S, self._services.restart_backoff_s * 2**again)

    def restarted(self, name: str) -> None:
        """It runs again."""
        self._part(name).state = "ok"
        self.num_restarts += 1

    def _part(self, name: str) -> _Part:
        return self._parts.setdefault(name, _Part())


def find_failures(statuses: Mapping[str, Mapping[str, Any]], answer_timeout_s: float) -> list[Failure]:
    """What the statuses of a runtime say is wrong, what all others need first."""
    found = [failure for name, status in statuses.items() if (failure := _failure(name, status, answer_timeout_s))]
    return sorted(found, key=lambda failure: not failure.is_of_runtime)


def _failure(name: str, status: Mapping[str, Any], answer_timeout_s: float) -> Failure | None:
    if error := status.get("error"):
        return Failure(name, str(error), status.get("error_kind") or "crash")
    silent_s = float(status.get("silent_s") or 0.0)
    if silent_s > answer_timeout_s:
        limit = f"services.answer_timeout_s = {answer_timeout_s:g}"
        return Failure(name, f"{name} has not said its status for {silent_s:.0f} s ({limit})", "silent")
    if status.get("activity") == "not started":
        return Failure(name, f"the process of {name} died and was replaced", "dead")
    return None
