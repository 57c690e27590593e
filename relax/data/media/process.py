"""One media worker, seen from its parent. All calls block: each worker has a thread of the pool that waits for it."""

import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
from numpy.typing import NDArray

from relax.child import end_child, start_child
from relax.config.media import MediaConfig
from relax.data.media.wire import Done, Job, Ready, Refused, Setup, receive, send
from relax.errors import ConfigError, DataError
from relax.shared_arrays import take

START_LIMIT_S = 120.0  # to import transforms and the processor


class WorkerLost(Exception):
    """The worker died, or spoke nonsense."""


class MediaWorker:
    """A process that decodes as `setup` says. Raises `ConfigError` when it cannot be started so."""

    def __init__(self, setup: Setup, spool_fd: int) -> None:
        self.num_piped_bytes = 0
        self._ending = threading.Lock()
        self._channel, theirs = socket.socketpair()
        life_read, self._life_fd = os.pipe()
        try:
            self._process = start_child("relax.data.media.worker", (theirs.fileno(), life_read, spool_fd))
        except OSError as error:
            self._channel.close()
            os.close(self._life_fd)
            raise ConfigError(f"a media worker cannot be started: {error}") from error
        finally:
            theirs.close()
            os.close(life_read)
        try:
            answer, _ = self._exchange(setup, Ready | Refused, START_LIMIT_S)
        except TimeoutError:
            self.kill()
            raise ConfigError(f"a media worker was not ready within {START_LIMIT_S:g} s") from None
        except WorkerLost as lost:
            raise ConfigError(f"a media worker could not be set up: {lost}") from lost
        if isinstance(answer, Refused):
            self.kill()
            raise ConfigError(answer.error)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, job: Job, limit_s: float) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Values and arrays of one prompt. Raises `DataError` as the worker says, `WorkerLost`, or `TimeoutError`, after which
        the worker is killed."""
        try:
            answer, fd = self._exchange(job, Done | Refused, limit_s)
        except TimeoutError:
            self.kill()
            raise
        except (TypeError, ValueError, OverflowError) as error:  # of the encoder, before anything was sent
            raise DataError(f"{job.key}: its messages cannot be sent to a media worker: {error}") from error
        if isinstance(answer, Refused):
            raise DataError(answer.error)
        if fd is None:
            raise WorkerLost(self.kill())
        try:
            return answer.values, take(answer.arrays, answer.num_bytes, fd)
        finally:
            os.close(fd)

    def kill(self) -> str:
        """Ends the process; returns how it ended. Can be called again, and from another thread while `run` waits."""
        with self._ending:
            how = end_child(self._process)
            if self._life_fd >= 0:
                os.close(self._life_fd)
                self._life_fd = -1
                self._channel.close()
        return how

    def _exchange(self, message: msgspec.Struct, kind: Any, limit_s: float) -> tuple[Any, int | None]:
        try:
            self._channel.settimeout(limit_s)
            self.num_piped_bytes += send(self._channel, message)
            received = receive(self._channel, kind)
        except TimeoutError:
            raise
        except (OSError, msgspec.MsgspecError) as error:
            raise WorkerLost(f"{error} ({self.kill()})") from error
        if received is None:
            raise WorkerLost(self.kill())
        return received


def setup_message(config: MediaConfig, processor: str | None, options: Mapping[str, Any]) -> Setup:
    """What a worker is told first."""
    return Setup(config.model_dump(mode="json"), processor, dict(options), sys.path)
