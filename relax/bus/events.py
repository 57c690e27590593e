"""The stream of events that roles write and the controller reads: numbered, forgotten when read, bounded where nobody reads."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from relax.bus.columns import encode_json
from relax.errors import BusError

BACKLOG = 10_000


class Events:
    """At most the last `BACKLOG` events; `seq` starts at 1 and has no gaps, so that a reader sees when it was too slow."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=backlog)
        self.seq = 0

    def emit(self, event: Mapping[str, Any]) -> None:
        if "kind" not in event:
            raise BusError(f"an event needs a 'kind'; this one has {sorted(event)}")
        try:
            encode_json(dict(event))
        except (TypeError, OverflowError) as error:
            raise BusError(f"event {event['kind']!r}: {error}; an event holds JSON values") from error
        self.seq += 1
        self._events.append({**event, "seq": self.seq})

    def after(self, seq: int) -> list[dict[str, Any]]:
        """The events after `seq`. Those up to it are the reader's by now, of which there is one: they are forgotten."""
        while self._events and self._events[0]["seq"] <= seq:
            self._events.popleft()
        return list(self._events)
