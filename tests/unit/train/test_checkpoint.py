"""Whatever happens while a checkpoint is written, the newest complete one can be read."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax.errors import CheckpointError
from relax.train.checkpoint import CheckpointStore


def fill(text):
    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text(text)
        (folder / "step.json").write_text(text)

    return write


def content(store):
    """What a reader finds: the step, and both files; fails if they do not belong together."""
    step, path = store.latest()
    found = {(path / "inner" / "weights").read_text(), (path / "step.json").read_text()}
    assert len(found) == 1, "a mixture"
    return step, found.pop()


class Crash(BaseException):
    """The machine stops here."""


OPERATIONS = [(os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (os, "open"), (Path, "rename"),
              (Path, "mkdir"), (Path, "touch"), (Path, "unlink"), (Path, "write_text"), (shutil, "rmtree")]  # fmt: skip


def crash_at(monkeypatch, number):
    """Lets every file operation before the `number`-th pass, and none from then on: even cleaning up fails."""
    count = 0

    def guarded(original):
        def call(*args, **options):
            nonlocal count
            count += 1
            if count > number:
                raise Crash
            return original(*args, **options)

        return call

    for owner, name in OPERATIONS:
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_a_crash_between_any_two_file_operations_leaves_one_that_loads(tmp_path, monkeypatch, keep, again):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted below, but not waited for
    crashes = 0
    for number in range(200):
        folder = tmp_path / str(number)
        store = CheckpointStore(folder, keep)
        store.write(1, fill("one"))
        store.write(2, fill("two"))
        step = 2 if again else 3
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                store.write(step, fill("new"))
                done = True
            except Crash:
                done, crashes = False, crashes + 1
        after = CheckpointStore(folder, keep)  # the process that starts next
        assert content(after) in ([(step, "new")] if done else [(2, "two"), (step, "new")])
        after.write(4, fill("four"))
        assert content(after) == (4, "four")
        names = sorted(path.name for path in folder.iterdir())
        assert len(names) <= keep, names
        if done:
            break
    assert crashes > 10


def test_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path / "new" / "folder", 2)
    assert store.latest() is None
    for step in (1, 2, 10, 9):
        store.write(step, fill(str(step)))
    assert sorted(path.name for path in store.latest()[1].parent.iterdir()) == ["step_10", "step_9"]
    assert content(store) == (10, "10")


def test_incomplete_and_foreign_folders_are_not_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, 3)
    store.write(3, fill("three"))
    for name in ("step_7", "step_8.partial", "step_x", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "step.json").write_text("{}")
    assert content(store) == (3, "three")
    store.write(4, fill("four"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_3", "step_4", "step_x"]


def test_a_full_disk_says_so_and_leaves_the_last_one(tmp_path):
    store = CheckpointStore(tmp_path, 1)
    store.write(1, fill("one"))

    def full(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"step_2.*No space left on device"):
        store.write(2, full)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert content(store) == (1, "one")


def test_an_error_of_a_part_passes_through_and_leaves_nothing(tmp_path):
    def broken(folder: Path) -> None:
        raise CheckpointError("the back end says why")

    with pytest.raises(CheckpointError, match="says why"):
        CheckpointStore(tmp_path, 1).write(2, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointStore(tmp_path / "file" / "below", 1).write(1, fill("x"))


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def fill(folder: Path) -> None:
        raise CheckpointError(f"{folder}: unexpected pos 499392 vs 499284")

    store = CheckpointStore(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=r"^[^:]*step_1.partial: unexpected"):
        store.write(1, fill)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(CheckpointError, match=r"the disk is full, 4 KiB are left: .*unexpected pos"):
        store.write(1, fill)
    assert not list(tmp_path.iterdir())


def test_what_is_of_another_future_is_forgotten(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=3)
    for step in (2, 4, 6):
        store.write(step, fill(str(step)))
    store.forget_after(3)
    assert content(store) == (2, "2")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_2"]
    store.write(3, fill("3"))
    assert list(store.all()) == [2, 3], "later ones would have pushed it out"
