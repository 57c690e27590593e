"""Every issue's fate in one SQLite file: issued = trained + filtered + failed + dropped + in flight.

A prompt whose group was dropped may be issued again, under a new number: the column `prompt` says which issues are of the same.
Times are left out: what is in the ledger is the same in a run that was stopped and resumed.
"""

import sqlite3
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from relax.errors import BusError


class Fate(StrEnum):
    """What became of an issue. `IN_FLIGHT`: being generated, queued, or waiting to be issued again."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    DROPPED = "dropped"


_TABLE = """CREATE TABLE IF NOT EXISTS issues (
    issue INTEGER PRIMARY KEY,  -- group id
    prompt INTEGER NOT NULL,    -- its prompt's number in the order of the data
    fate TEXT NOT NULL,         -- in_flight, trained, filtered, failed, dropped
    reason TEXT NOT NULL,       -- why it was filtered, failed or dropped
    version INTEGER NOT NULL,   -- policy version when it was admitted; once it has rows, the oldest in them
    batch INTEGER NOT NULL,     -- the step that it was admitted for
    step INTEGER,               -- the step that trained it
    num_rows INTEGER            -- samples, once there are any
)"""
_INDEX = "CREATE INDEX IF NOT EXISTS by_prompt ON issues (prompt)"


class Ledger:
    """The table `issues`. Changes are durable after `commit`; the core commits at each step, snapshot and end."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # may be made in one thread and used in the event loop of another, as in Ray's actors; never in two at once
            self._db = sqlite3.connect(self.path, isolation_level="DEFERRED", check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_TABLE)
            columns = [row[1] for row in self._db.execute("PRAGMA table_info(issues)")]
            if "prompt" in columns:
                self._db.execute(_INDEX)
            self._db.commit()
        except sqlite3.Error as error:
            raise BusError(f"{self.path}: the ledger cannot be opened: {error}") from error
        if "prompt" not in columns:
            self._db.close()
            raise BusError(
                f"{self.path}: a ledger of an earlier version of relax, without the column 'prompt': finish that run with the "
                "version that began it, or begin a new one in another run folder"
            )

    def issued(self, issue: int, prompt: int, version: int, batch: int) -> None:
        sql = "INSERT OR REPLACE INTO issues VALUES (?, ?, 'in_flight', '', ?, ?, NULL, NULL)"
        self._execute(sql, (issue, prompt, version, batch))

    def arrived(self, issue: int, version: int, num_rows: int) -> None:
        self._execute("UPDATE issues SET version = ?, num_rows = ? WHERE issue = ?", (version, num_rows, issue))

    def settled(self, issue: int, fate: Fate, reason: str = "", step: int | None = None) -> None:
        self._execute("UPDATE issues SET fate = ?, reason = ?, step = ? WHERE issue = ?", (fate.value, reason, step, issue))

    def restore(self, next_issue: int, in_flight: Iterable[int]) -> None:
        """Goes back to a snapshot: later issues never happened, and these were in flight.

        Raises `BusError` when the file does not know the earlier issues: it is another run's.
        """
        self._execute("DELETE FROM issues WHERE issue >= ?", (next_issue,))
        for issue in in_flight:
            self._execute("UPDATE issues SET fate = 'in_flight', reason = '', step = NULL WHERE issue = ?", (issue,))
        self.commit()
        known = self.counts()["issued"]
        if known != next_issue:
            raise BusError(
                f"{self.path}: the ledger knows {known} issues, the snapshot {next_issue}: they are of different runs"
            )

    def counts(self) -> dict[str, int]:
        """Issues by fate, every fate named, and `issued`, their sum."""
        found = dict(self._execute("SELECT fate, COUNT(*) FROM issues GROUP BY fate", ()).fetchall())
        counts = {fate.value: int(found.get(fate.value, 0)) for fate in Fate}
        return {"issued": sum(counts.values()), **counts}

    def check(self, counts: dict[str, int]) -> None:
        """Raises `BusError` when the file's counts are not these, or a prompt was trained twice."""
        if (found := self.counts()) != counts:
            raise BusError(f"{self.path}: a fault of the transfer queue: the ledger has {found}, the queue {counts}")
        sql = "SELECT prompt FROM issues WHERE fate = 'trained' GROUP BY prompt HAVING COUNT(*) > 1 LIMIT 1"
        for (prompt,) in self._execute(sql, ()):
            raise BusError(f"{self.path}: a fault of the transfer queue: prompt {prompt} was trained more than once")

    def commit(self) -> None:
        try:
            self._db.commit()
        except sqlite3.Error as error:
            raise BusError(f"{self.path}: the ledger cannot be written: {error}") from error

    def close(self) -> None:
        self.commit()
        self._db.close()

    def _execute(self, sql: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        try:
            return self._db.execute(sql, values)
        except sqlite3.Error as error:
            raise BusError(f"{self.path}: the ledger cannot be used: {error}") from error
