"""Checkpoints that are complete or not there.

    step_12.partial/   files are written, then flushed to the disk         a crash here leaves a folder that is ignored,
    step_12/           the same folder, renamed                            and removed by the next write
    step_12/complete   the marker, itself renamed into place: from now on this is the latest; older ones may go

The last good checkpoint is never the first to be deleted: old ones go when a newer one is complete, and each loses its marker
before its files.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from relax.errors import CheckpointError

_MARKER, _PARTIAL, _REPLACED = "complete", ".partial", ".replaced"
_NEARLY_FULL = 1 << 20  # bytes
_NAME = re.compile(rf"step_(\d+)({re.escape(_REPLACED)})?")


class CheckpointStore:
    """Checkpoints `step_N` in `folder`, of which the `keep` newest stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        assert keep >= 1, "at least one checkpoint stays"
        self._folder, self._keep = folder, keep

    def write(self, step: int, write_parts: Callable[[Path], None]) -> Path:
        """Lets `write_parts` fill a new folder and makes it the checkpoint of `step`; returns its path.

        Raises `CheckpointError` with the path and the cause when the disk does not take it (full, read-only, gone); what was
        written is removed, and the checkpoints before are untouched. An error of `write_parts` itself passes through.
        """
        final = self._folder / f"step_{step}"
        partial, replaced = (final.with_name(final.name + suffix) for suffix in (_PARTIAL, _REPLACED))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            partial.mkdir()
            write_parts(partial)
            _flush_tree(partial)
            if final.exists():  # the same step again, after a resume: the old one counts until the new one is complete
                if replaced.exists():
                    _remove(replaced)
                final.rename(replaced)
            partial.rename(final)
            _flush(self._folder)
            _mark(final)
        except OSError as error:
            self._give_up(partial, final)
            raise CheckpointError(f"{final}: the checkpoint cannot be written: {error.strerror or error}") from error
        except CheckpointError as error:
            free = shutil.disk_usage(self._folder).free
            self._give_up(partial, final)
            if free < _NEARLY_FULL:  # each writer has its own words for a full disk, and not all can be understood
                raise CheckpointError(f"the disk is full, {free >> 10} KiB are left: {error}") from error
            raise
        except BaseException:
            self._give_up(partial, final)
            raise
        self._remove_old()
        return final

    def latest(self) -> tuple[int, Path] | None:
        """(step, path) of the newest complete checkpoint."""
        complete = self._complete()
        return complete[-1] if complete else None

    def all(self) -> dict[int, Path]:
        """Path of every complete checkpoint by its step, oldest first."""
        return dict(self._complete())

    def forget_after(self, step: int) -> None:
        """Removes the checkpoints of later steps than `step`: they are of a future that the run has not."""
        try:
            for later, path in self._complete():
                if later > step:
                    _remove(path)
        except OSError as error:
            raise CheckpointError(f"{self._folder}: a checkpoint cannot be removed: {error.strerror or error}") from error

    def _complete(self) -> list[tuple[int, Path]]:
        """Oldest first; of one step, the one that was replaced before the one that replaced it."""
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name)) and (path / _MARKER).is_file()]
        return sorted(((int(match[1]), path) for match, path in found), key=lambda item: (item[0], item[1].suffix != _REPLACED))

    def _remove_leftovers(self) -> None:
        """What a crash left: folders that never became complete."""
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name.removesuffix(_PARTIAL)) and not (path / _MARKER).is_file():
                shutil.rmtree(path)

    def _give_up(self, partial: Path, final: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        if not (final / _MARKER).is_file():
            shutil.rmtree(final, ignore_errors=True)

    def _remove_old(self) -> None:
        complete = self._complete()
        newest = dict(complete)  # of one step the last
        kept = list(newest.values())[-self._keep :]
        try:
            for _, path in complete:
                if path not in kept:
                    _remove(path)
        except OSError as error:
            raise CheckpointError(f"{self._folder}: an old checkpoint cannot be removed: {error.strerror or error}") from error


def _remove(path: Path) -> None:
    """The marker goes first: a half-deleted checkpoint is not one."""
    (path / _MARKER).unlink(missing_ok=True)
    _flush(path)
    shutil.rmtree(path)


def _mark(path: Path) -> None:
    marker = path / (_MARKER + _PARTIAL)
    marker.touch()
    _flush(marker)
    marker.rename(path / _MARKER)
    _flush(path)


def _flush_tree(folder: Path) -> None:
    """Every file's bytes and every folder's names, inner ones first."""
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
