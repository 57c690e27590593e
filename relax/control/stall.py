"""Why nothing moves, in words: who waits for what, who does not wait, who has no weights, and which groups are held up."""

from collections.abc import Mapping, Sequence
from typing import Any

from relax.observe.progress import shown_waits, without_weights

_NUM_IDS = 8
_NUM_WAITS = 5


class ProgressWatch:
    """Since when nothing useful was done. `now` is monotonic, in seconds."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._progress: dict[str, int] = {}

    def moved(self, now: float) -> None:
        """Something useful was done."""
        self._since = now

    def look(self, statuses: Mapping[str, Mapping[str, Any]], now: float) -> None:
        """Takes the roles' own counts of what they have done."""
        for name, status in statuses.items():
            if (count := status.get("progress")) is not None and self._progress.get(name) != count:
                self._progress[name] = count
                self._since = now

    def stalled_s(self, now: float) -> float:
        return now - self._since


def explain_stall(statuses: Mapping[str, Mapping[str, Any]], stats: Mapping[str, Any], stalled_s: float, limit_s: float) -> str:
    """The message that ends a run in which nothing moves."""
    waits = shown_waits(stats, longer_than_s=0.0)
    waiting = {str(wait["who"]) for wait in stats.get("waits", ())}
    busy = [name for name, status in statuses.items() if status.get("running", True) and name not in waiting]
    lines = [
        f"no step ended and no sample arrived for {stalled_s:.0f} s (services.progress_timeout_s = {limit_s:g})",
        *(f"{name}: {_doing(statuses[name])}" for name in busy),
        *waits[:_NUM_WAITS],
        *(f"{name} has no weights: {why}" for name, why in without_weights(stats).items()),
    ]
    tickets = stats.get("tickets", {}).get("in_flight", [])
    if tickets:
        lines.append(f"groups that are being generated: {_listed(tickets)}")
    if to_again := stats.get("depth", {}).get("groups", {}).get("to_generate_again"):
        lines.append(f"{to_again} groups are to be generated again")
    return "\n  ".join(lines)


def _doing(status: Mapping[str, Any]) -> str:
    leases = status.get("leases") or []
    held = f", holds {len(leases)} lease{'s' * (len(leases) > 1)} ({_listed(leases)})" if leases else ""
    silent = f", has not answered for {status['silent_s']:.0f} s" if status.get("silent_s") else ""
    return f"{status.get('activity', 'unknown')}{held}{silent}"


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:_NUM_IDS])
    return shown + (f" and {len(values) - _NUM_IDS} more" if len(values) > _NUM_IDS else "")
