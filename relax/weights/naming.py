"""Sets of weight names must match exactly: a name that is missing or left over is an error, never a default."""

from collections.abc import Iterable
from difflib import get_close_matches

from relax.errors import WeightSyncError

_SHOWN = 10


def check_names(expected: Iterable[str], given: Iterable[str], receiver: str = "the receiver") -> None:
    """Raises `WeightSyncError` that lists missing and left-over names, each with the nearest name of the other side."""
    wanted, found = set(expected), set(given)
    missing, left_over = sorted(wanted - found), sorted(found - wanted)
    if missing or left_over:
        parts = [_listed("missing", missing, left_over), _listed("left over", left_over, missing)]
        raise WeightSyncError(f"weight names do not match what {receiver} expects: {'; '.join(part for part in parts if part)}")


def _listed(what: str, names: list[str], others: list[str]) -> str:
    shown = []
    for name in names[:_SHOWN]:
        near = get_close_matches(name, others, n=1, cutoff=0.6)
        shown.append(f"{name!r} (nearest: {near[0]!r})" if near else repr(name))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(shown)}{more}" if names else ""
