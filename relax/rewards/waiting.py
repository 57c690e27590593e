"""Why a reward waits for somebody, kept for the moment in which its time limit ends the wait."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Wait:
    """Of one call of a reward. `why` is empty while nothing is known against whom it waits for."""

    why: str = ""


_wait: ContextVar[Wait | None] = ContextVar("wait", default=None)


def begin_wait() -> Wait:
    """What this task, and those that it starts from now on, say with `wait_because`."""
    wait = Wait()
    _wait.set(wait)
    return wait


def wait_because(why: str) -> None:
    """Keeps `why` this task waits, or with an empty text that it no longer does. Outside of a reward it says nothing."""
    if (wait := _wait.get()) is not None:
        wait.why = why
