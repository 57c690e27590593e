"""What is read out of a run's ledger: counts, and every way in which it can fail to close."""

import sqlite3
from pathlib import Path

import pytest

from relax.config import make_config
from relax.errors import DataError, RoleError
from relax.observe.ledger_file import LedgerFile, conservation

CONFIG = make_config(
    {
        "model": {"path": "m"},
        "data": {"type": "generator", "path": "relax.data.arithmetic:addition"},
        "reward": {"type": "exact"},
        "train": {"num_steps": 2},
        "rollout": {"prompts_per_step": 2},
    }
)
WHOLE = [
    (0, 0, "trained", ""),
    (1, 1, "dropped", "lost with step 3"),
    (2, 2, "trained", ""),
    (3, 1, "trained", ""),
    (4, 3, "trained", ""),
]


def ledger(folder: Path, rows: list[tuple[int, int, str, str]]) -> LedgerFile:
    with sqlite3.connect(folder / "ledger.sqlite") as database:
        database.execute("CREATE TABLE issues (issue INTEGER PRIMARY KEY, prompt INTEGER, fate TEXT, reason TEXT)")
        database.executemany("INSERT INTO issues VALUES (?, ?, ?, ?)", rows)
    database.close()
    return LedgerFile(folder)


def test_a_ledger_that_closes_is_accepted(tmp_path):
    found = ledger(tmp_path, WHOLE)
    found.check_complete(CONFIG)
    assert found.counts() == {"issued": 5, "dropped": 1, "trained": 4}
    assert conservation(found.counts()) == "5 issued = 4 trained + 1 dropped"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({4: (4, 3, "filtered", "")}, r"3 groups are trained, 4 were to be.*'filtered': 1"),
        ({4: (4, 2, "trained", "")}, r"1 prompts are trained more than once: 2 \(2 times\)"),
        ({5: (5, 4, "in_flight", "")}, "1 groups are still in flight"),
        ({5: (5, 3, "in_flight", "")}, "1 prompts are trained and in flight"),
        ({1: (1, 1, "forgotten", "")}, "unknown fate 'forgotten'"),
    ],
)
def test_every_violation_is_named_with_the_counts(tmp_path, change, message):
    rows = dict(enumerate(WHOLE)) | change
    with pytest.raises(RoleError, match=message):
        ledger(tmp_path, list(rows.values())).check_complete(CONFIG)


def test_surplus_of_oversampling_may_be_left(tmp_path):
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"oversampling": 1.5})})
    ledger(tmp_path, [*WHOLE, (5, 4, "in_flight", "")]).check_complete(config)


def test_a_run_that_had_no_step_left_may_have_groups_for_later_ones(tmp_path):
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"num_steps": 1})})
    found = ledger(tmp_path, [*WHOLE, (5, 4, "in_flight", "")])
    found.check_complete(config, first_step=2)
    with pytest.raises(RoleError, match="4 groups are trained, 2 were to be"):
        found.check_complete(config)


def test_reasons_of_drops_are_counted_without_their_numbers(tmp_path):
    rows = [(n, n, "dropped", f"lost with the trainer: it goes back to step {n}") for n in range(3)]
    found = ledger(tmp_path, [*rows, (3, 3, "dropped", "too old")])
    assert found.drops() == [("lost with the trainer: it goes back to step", 3), ("too old", 1)]


def test_a_run_without_a_ledger_yet_has_no_counts_and_a_damaged_one_is_named(tmp_path):
    assert LedgerFile(tmp_path).counts() is None
    assert LedgerFile(tmp_path).faults() == []
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"ledger\.sqlite: the ledger cannot be read"):
        LedgerFile(tmp_path).counts()
