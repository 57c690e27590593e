"""A group of rows in the queue, and how row ids are made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from relax.errors import BusError, StaleHandle
from relax.types import Column

_INDEX_BITS, _ISSUE_BITS, _INCARNATION_BITS = 12, 27, 24
MAX_ROWS = 1 << _INDEX_BITS
INCARNATIONS = 1 << _INCARNATION_BITS


@dataclass(frozen=True, slots=True)
class RowIds:
    """Row ids of one incarnation of the core: (incarnation, issue, index in the group) in the bits of one number.

    An issue is put once in an incarnation, so that no id comes twice; ids of other incarnations are told from ours.
    """

    incarnation: int

    def make(self, issue: int, num_rows: int) -> list[int]:
        if num_rows > MAX_ROWS:
            raise BusError(f"group {issue}: {num_rows} rows; a group has at most {MAX_ROWS}")
        if issue >> _ISSUE_BITS:
            raise BusError(f"group {issue}: issue numbers end at {1 << _ISSUE_BITS}")
        first = ((self.incarnation << _ISSUE_BITS) | issue) << _INDEX_BITS
        return list(range(first, first + num_rows))

    def issue_of(self, row_id: int) -> int:
        """The group that a row is in; raises `StaleHandle` for ids of another incarnation."""
        rest = row_id >> _INDEX_BITS
        if rest >> _ISSUE_BITS != self.incarnation:
            raise StaleHandle(f"row {row_id} belongs to an earlier life of the transfer queue")
        return rest & ((1 << _ISSUE_BITS) - 1)


@dataclass(slots=True, eq=False)
class Group:
    """The rows of one issue. `version`: oldest policy version in it; `due`: the last step that may consume it; `columns`: those
    that every row has; `shared`: arrays of the group as a whole, which stay as long as one row does.

    `parts[name]` holds single rows' values of a column that is not complete yet, `None` where one is missing.
    `returned`: a lease on it came back, so that a second writer may come with values of its own.
    """

    issue: int
    version: int
    due: int
    row_ids: tuple[int, ...]
    num_put: int  # rows at first; some may have been dropped since
    columns: dict[str, Column]
    num_bytes: int
    shared: dict[str, NDArray[Any]] = field(default_factory=dict)
    parts: dict[str, list[Any]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # tasks that have acknowledged it
    returned: bool = False

    @property
    def num_shared_bytes(self) -> int:
        return sum(array.nbytes for array in self.shared.values())


def issues_text(issues: Sequence[int], most: int = 8) -> str:
    """`issues 3, 4, 9`, shortened."""
    shown = ", ".join(str(issue) for issue in issues[:most])
    more = f" and {len(issues) - most} more" if len(issues) > most else ""
    return f"issue{'s' if len(issues) != 1 else ''} {shown}{more}"
