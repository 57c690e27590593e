"""The one-host transport: private folders, nothing left behind, room checked before writing."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relax.errors import WeightSyncError
from relax.weights import shared_memory
from relax.weights.shared_memory import PublishedFile, ShmFolder, cleanup_stale


def test_the_folder_is_private_names_its_owner_and_goes_with_close(roots):
    folder = ShmFolder("my run/1")
    assert folder.paths == ()
    file = folder.new_file(100)
    (path,) = folder.paths
    assert path.stat().st_mode & 0o777 == 0o700
    assert f"-{os.getpid()}-my_run_1-" in path.name
    assert (file.transport, file.path.stat().st_size) == ("shm", 100)
    file.close()
    folder.close()
    assert list(roots[0][1].iterdir()) == []


def test_two_runs_of_one_name_do_not_meet(roots):
    first, second = ShmFolder("run"), ShmFolder("run")
    a, b = first.new_file(10), second.new_file(10)
    assert a.path != b.path
    assert cleanup_stale() == []
    first.close()
    assert b.path.exists()
    second.close()


def test_what_a_killed_owner_left_is_removed_by_the_next_run(roots):
    root = roots[0][1]
    code = (
        "import os, sys; from pathlib import Path; from relax.weights.shared_memory import ShmFolder\n"
        "ShmFolder('old', roots=[('shm', Path(sys.argv[1]))]).new_file(10); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=False)
    (left,) = root.iterdir()
    mine = ShmFolder("new")
    mine.new_file(10)
    assert not left.exists()
    assert cleanup_stale() == []
    mine.close()


def test_a_folder_that_is_just_being_made_is_not_taken_for_stale(roots):
    young = roots[0][1] / f"{shared_memory.PREFIX}-1-x-0"
    young.mkdir()
    assert cleanup_stale() == []
    os.utime(young, (1, 1))
    assert cleanup_stale() == [young]


def test_missing_shared_memory_falls_back_to_a_file(tmp_path):
    folder = ShmFolder("run", roots=[("shm", tmp_path / "nowhere"), ("file", tmp_path)])
    file = folder.new_file(10)
    assert file.transport == "file"
    file.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def full_for(monkeypatch, *roots):
    reserve = os.posix_fallocate

    def posix_fallocate(fd, offset, size):
        if any(Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(root) for root in roots):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)


def test_full_shared_memory_falls_back_to_a_file(roots, monkeypatch):
    full_for(monkeypatch, roots[0][1])
    folder = ShmFolder("run")
    file = folder.new_file(1000)
    assert file.transport == "file"
    assert file.path.parent.parent == roots[1][1]
    file.close()
    folder.close()
    assert [*roots[0][1].iterdir(), *roots[1][1].iterdir()] == []


def test_no_room_anywhere_says_so_for_each_place(roots, monkeypatch):
    full_for(monkeypatch, roots[0][1], roots[1][1])
    folder = ShmFolder("run")
    with pytest.raises(WeightSyncError, match=r"no room for 3\.0 MiB .*shm: No space left.*tmp: No space left.*--shm-size"):
        folder.new_file(3 << 20)
    folder.close()
    assert [*roots[0][1].iterdir(), *roots[1][1].iterdir()] == []


def test_a_buffer_is_not_written_while_it_is_mapped_and_not_read_while_it_is_written(roots):
    folder = ShmFolder("run")
    file = folder.new_file(10)
    with PublishedFile(str(file.path), 10) as reader:
        mapped = reader.map(0, 10)
        assert not file.lock_for_writing()
    assert not file.lock_for_writing(), "what is mapped is in use when the file is closed"
    del mapped
    assert file.lock_for_writing()
    with pytest.raises(WeightSyncError, match="being replaced by a newer version"):
        PublishedFile(str(file.path), 10)
    file.unlock()
    with PublishedFile(str(file.path), 10):
        pass
    file.close()
    folder.close()


def test_a_reader_that_is_killed_holds_no_lock(roots):
    folder = ShmFolder("run")
    file = folder.new_file(10)
    code = (
        "import os, sys; from relax.weights.shared_memory import PublishedFile\n"
        "m = PublishedFile(sys.argv[1], 10).map(0, 10); print('mapped', flush=True); sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(file.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout.readline() == "mapped\n"
    assert not file.lock_for_writing()
    reader.kill()
    reader.communicate()
    assert file.lock_for_writing()
    file.close()
    folder.close()
