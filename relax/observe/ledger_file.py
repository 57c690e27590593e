"""The ledger of a run, read from its SQLite file alone, while the run goes on or after: what became of every prompt.

issued = trained + filtered + failed + dropped + in flight
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax.config.run import RunConfig
from relax.errors import DataError, RoleError

FATES = ("trained", "filtered", "failed", "dropped", "in_flight")


class LedgerFile:
    """`ledger.sqlite` of a run folder. Every method raises `DataError` when it is there and cannot be read."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "ledger.sqlite"

    def counts(self) -> dict[str, int] | None:
        """Issues by fate, those that occur, and `issued`, their sum; none before the ledger is there."""
        found = self._query("SELECT fate, COUNT(*) FROM issues GROUP BY fate")
        if found is None:
            return None
        counts = {str(fate): int(count) for fate, count in sorted(found)}
        return {"issued": sum(counts.values()), **counts}

    def drops(self, most: int = 3) -> list[tuple[str, int]]:
        """(reason, count) of the groups that were dropped, most frequent first; numbers in reasons are left out."""
        found = self._query("SELECT reason, COUNT(*) FROM issues WHERE fate = 'dropped' GROUP BY reason") or []
        merged: dict[str, int] = {}
        for reason, count in found:
            words = " ".join(word for word in str(reason).split() if not word.strip(".,:;()").isdigit())
            merged[words] = merged.get(words, 0) + int(count)
        return sorted(merged.items(), key=lambda item: -item[1])[:most]

    def faults(self) -> list[str]:
        """What breaks the invariant at any time: fates that do not exist, prompts that have two lives at once."""
        counts = self.counts() or {}
        strange = [fate for fate in counts if fate not in (*FATES, "issued")]
        wrong = [f"{counts[fate]} issues have the unknown fate {fate!r}" for fate in strange]
        if "prompt" not in {row[1] for row in self._query("PRAGMA table_info(issues)") or ()}:  # of an earlier version
            return wrong
        for fate, what in (("trained", "trained"), ("in_flight", "in flight")):
            sql = "SELECT prompt, COUNT(*) FROM issues WHERE fate = ? GROUP BY prompt HAVING COUNT(*) > 1"
            if twice := self._query(sql, (fate,)):
                shown = ", ".join(f"{prompt} ({count} times)" for prompt, count in twice[:5])
                wrong.append(f"{len(twice)} prompts are {what} more than once: {shown}")
        sql = "SELECT COUNT(*) FROM issues a JOIN issues b USING (prompt) WHERE a.fate = 'trained' AND b.fate = 'in_flight'"
        if both := (self._query(sql) or [(0,)])[0][0]:
            wrong.append(f"{both} prompts are trained and in flight")
        return wrong

    def check_complete(self, config: RunConfig, first_step: int = 0) -> None:
        """At the end of a run: every place of every step was filled once. Raises `RoleError` with the counts otherwise.

        `first_step`: where the run began; one that had no step left to do may have groups for later ones.
        """
        num_steps = max(first_step, config.train.num_steps)
        counts, wanted = self.counts() or {"issued": 0}, config.rollout.prompts_per_step * num_steps
        wrong = self.faults()
        if counts.get("trained", 0) != wanted:
            wrong.append(f"{counts.get('trained', 0)} groups are trained, {wanted} were to be")
        spare = counts.get("in_flight", 0)
        if spare and config.rollout.oversampling <= 1 and first_step < num_steps:
            wrong.append(f"{spare} groups are still in flight")
        if wrong:
            raise RoleError(f"the ledger of the run does not close: {'; '.join(wrong)}. Its counts: {counts}")

    def _query(self, sql: str, values: Sequence[Any] = ()) -> list[Any] | None:
        if not self.path.is_file():
            return None
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self.path.resolve()}?mode=ro", uri=True, timeout=2.0)) as database:
                return database.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise DataError(f"{self.path}: the ledger cannot be read: {error}") from error


def conservation(counts: dict[str, int]) -> str:
    """`96 issued = 64 trained + 8 dropped + 24 in flight`."""
    parts = [f"{counts[fate]} {fate.replace('_', ' ')}" for fate in FATES if counts.get(fate)]
    return f"{counts['issued']} issued" + (f" = {' + '.join(parts)}" if parts else "")
