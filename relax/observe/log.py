"""Logs of a run: one file a process, `log/{name}.log` in the run folder."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


def log_to_file(run_dir: Path, name: str) -> None:
    """Sends this process's log to `log/{name}.log` in the run folder. Raises `OSError` when there is no room for it."""
    folder = run_dir / "log"
    folder.mkdir(parents=True, exist_ok=True)
    handler = LogFile(folder / f"{name}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("relax")
    for old in logger.handlers:
        old.close()
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextlib.contextmanager
def log_for_a_while(run_dir: Path, name: str) -> Iterator[None]:
    """The same within a `with` block: afterwards the process logs as before."""
    logger = logging.getLogger("relax")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers = []
    try:
        log_to_file(run_dir, name)
        yield
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers, level, logger.propagate = before
        logger.setLevel(level)  # the level is cached, which this clears


class LogFile(logging.FileHandler):
    """A file whose disk may fill up: that is said once, in a line, and the run goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self._is_lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._is_lost:
            self._is_lost = True
            sys.stderr.write(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}\n")


class NoteHandler(logging.Handler):
    """Shows what is logged as a note, without the traceback."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())
