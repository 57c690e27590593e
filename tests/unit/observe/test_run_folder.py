import json
import os
import sqlite3
import subprocess
import sys

import pytest

from relax.errors import ConfigError, DataError
from relax.observe.run_folder import RunFolder


def test_two_runs_in_one_folder_are_refused_with_the_pid(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a")
    with (
        folder.lock(),
        pytest.raises(ConfigError, match=rf"in use by another run \(process {os.getpid()}\).*run.name"),
        RunFolder(folder.path).lock(),
    ):
        pass
    with folder.lock():
        pass


def test_a_run_that_was_killed_holds_nothing_and_counts_as_failed(tmp_path):
    code = (
        "import os, sys; from relax.observe.run_folder import RunFolder\n"
        "f = RunFolder(sys.argv[1]); l = f.lock(); l.__enter__(); f.set_state('running', 7); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    folder = RunFolder(tmp_path)
    state = folder.state()
    assert (state.state, state.step) == ("failed", 7)
    assert "killed" in state.message
    with folder.lock():
        folder.set_state("running", 8)
        assert folder.state().state == "running"
    folder.set_state("finished", 9, "done")
    assert (folder.state().state, folder.state().pid, folder.state().message) == ("finished", os.getpid(), "done")


def test_looking_at_the_state_does_not_keep_a_run_from_starting(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.lock():
        folder.set_state("running", 0)
    for _ in range(20):
        folder.state()
        with folder.lock():
            folder.state()


def test_a_folder_is_fresh_until_a_run_writes_into_it_and_clear_removes_that_only(tmp_path, config):
    folder = RunFolder(tmp_path / "run")
    assert not folder.has_run()
    with folder.lock():
        assert not folder.has_run()
        folder.write_config(config)
        (folder.path / "checkpoints" / "step_3").mkdir(parents=True)
        (folder.path / "ledger.sqlite-wal").write_text("x")
        (folder.path / "notes.txt").write_text("mine")
        assert folder.has_run()
        folder.clear()
        assert not folder.has_run()
        assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "notes.txt"]


def test_the_configuration_comes_back(tmp_path, config):
    folder = RunFolder(tmp_path)
    folder.write_config(config)
    assert type(config).model_validate(folder.config()) == config


def test_checkpoints_are_in_order_and_unfinished_ones_left_out(tmp_path):
    for name in ("step_10", "step_9", "step_11.tmp", ".step_12"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert RunFolder(tmp_path).checkpoints() == ["step_9", "step_10"]


def test_the_ledger_is_counted_read_only(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.ledger_counts() is None
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE issues (issue INTEGER PRIMARY KEY, fate TEXT)")
    database.executemany("INSERT INTO issues(fate) VALUES (?)", [("trained",), ("trained",), ("in_flight",)])
    database.commit()
    assert folder.ledger_counts() == {"issued": 3, "in_flight": 1, "trained": 2}
    database.close()
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, but long enough to be taken for a damaged one")
    with pytest.raises(DataError, match="ledger cannot be read"):
        folder.ledger_counts()


def test_what_is_not_a_run_folder_is_said_clearly(tmp_path, config):
    with pytest.raises(ConfigError, match="there is no such folder"):
        RunFolder(tmp_path / "nowhere").check_is_run()
    inside = RunFolder(tmp_path / "a")
    inside.write_config(config)
    inside.set_state("finished", 1)
    with pytest.raises(ConfigError, match=r"it has no config\.json; these in it are: a"):
        RunFolder(tmp_path).check_is_run()
    inside.check_is_run()


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"state\.json: not JSON"):
        RunFolder(tmp_path).state()
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match=r"config\.json: not a JSON object but list"):
        RunFolder(tmp_path).config()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*set run\.dir"), RunFolder(tmp_path / "file" / "run").lock():
        pass
