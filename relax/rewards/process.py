"""One reward worker, seen from its parent: start, send, receive, kill."""

import asyncio
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax.child import end_child, start_child
from relax.config.reward import FunctionRewardConfig, RewardConfig
from relax.data.media.source import Spool
from relax.errors import ConfigError, RewardError
from relax.rewards.services import as_environment
from relax.rewards.wire import (
    MAX_MESSAGE_BYTES,
    PROGRESS,
    CallResult,
    Frame,
    Kind,
    Ready,
    Refused,
    Results,
    Setup,
    pack,
    past_limit,
    unpack,
)

START_LIMIT_S = 120.0  # to import the reward and what it needs
SETTLE_S = 0.05  # results that came while this event loop was busy elsewhere are read before a worker counts as late


class WorkerGone(RewardError):
    """The worker died, spoke nonsense, or was in one call for too long."""


class WorkerProcess:
    """A worker that has imported its rewards. Made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], life_fd: int, progress: mmap.mmap) -> None:
        self._process, self._life_fd, self._progress = process, life_fd, progress
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._next: asyncio.Task[bytes] | None = None
        self._sent_at = 0.0
        self.kinds: Sequence[Kind] = ()  # of the rewards, in their order
        self.running: Any = None  # the pool's note of what ran when the worker was lost

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running_number(self) -> int:
        """Number in its frame of the call that runs or ran last; -1 when none was begun."""
        return int(PROGRESS.unpack_from(self._progress, 0)[1]) - 1

    @staticmethod
    async def start(
        configs: Sequence[RewardConfig],
        limit_s: float = START_LIMIT_S,
        services: Mapping[str, str] | None = None,
        spool: Spool | None = None,
    ) -> "WorkerProcess":
        """Starts a worker and waits until it has imported its rewards. `services`: URLs of roles that they may ask, by name;
        `spool`: the bytes of media that came inside rows.

        Raises `ConfigError` when a reward cannot be imported in `limit_s` seconds, or the worker dies of it; `RewardError`
        when no process can be started.
        """
        ours, theirs = socket.socketpair()
        life_read, life_write = os.pipe()
        with tempfile.TemporaryFile() as shared:
            shared.truncate(PROGRESS.size)
            progress = mmap.mmap(shared.fileno(), PROGRESS.size)
            fds = (theirs.fileno(), life_read, shared.fileno(), *([spool.fd] if spool is not None else []))
            try:
                process = await asyncio.to_thread(start_child, "relax.rewards.worker", fds, as_environment(services or {}))
            except BaseException as error:  # cancelled: a worker that was started all the same sees the closed ends, and ends
                os.close(life_write)
                ours.close()
                if isinstance(error, OSError):
                    raise RewardError(f"a reward worker cannot be started: {error}") from error
                raise
            finally:
                os.close(life_read)
                theirs.close()
        worker = WorkerProcess(process, life_write, progress)
        try:
            worker._reader, worker._writer = await asyncio.open_connection(sock=ours)
            worker._writer.write(pack(Setup([config.model_dump(mode="json") for config in configs], sys.path)))
            async with asyncio.timeout(limit_s):
                answer = unpack(await worker._read(), Ready | Refused)  # type: ignore[arg-type]
        except TimeoutError:
            await worker.kill()
            raise ConfigError(f"{_named(configs)}: it was not imported within {limit_s:g} s") from None
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError) as error:
            code = await worker.kill()
            raise ConfigError(f"{_named(configs)}: the worker ended while it imported the reward ({code})") from error
        except BaseException:
            await worker.kill()
            raise
        if isinstance(answer, Refused):
            await worker.kill()
            raise ConfigError(answer.error)
        worker.kinds = answer.kinds
        return worker

    def send(self, frame: Frame) -> None:
        """Gives the worker a frame of calls. It has none in hand."""
        PROGRESS.pack_into(self._progress, 0, 0.0, 0)
        self._sent_at = time.monotonic()
        self._writer.write(pack(frame))

    async def results(self, time_limit_s: float, grace_s: float) -> list[CallResult]:
        """The next results. Raises `WorkerGone` when the worker is lost, or is in one call for `time_limit_s + grace_s`."""
        if self._next is None:
            self._next = asyncio.create_task(self._read())
        while True:
            began, number = PROGRESS.unpack_from(self._progress, 0)
            late_at = max(began, self._sent_at) + time_limit_s + grace_s
            done, _ = await asyncio.wait({self._next}, timeout=max(late_at - time.monotonic(), SETTLE_S))
            if done:
                break
            if number == 0:
                late_at += START_LIMIT_S  # the worker has not come to the first call: the machine is busy
            if time.monotonic() > late_at and PROGRESS.unpack_from(self._progress, 0) == (began, number):
                raise WorkerGone(f"{past_limit(time_limit_s)}; its worker was replaced")
        task, self._next = self._next, None
        try:
            return unpack(task.result(), Results).results
        except (asyncio.IncompleteReadError, OSError) as error:
            code = await self.kill()
            raise WorkerGone(f"the reward worker ended while it scored this response ({code})") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WorkerGone(f"the reward worker sent what is not a result: {error}") from error

    async def kill(self) -> str:
        """Ends the worker and all that it started; returns how it ended. Idempotent."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._life_fd >= 0:
            with_exit = await asyncio.to_thread(end_child, self._process)
            os.close(self._life_fd)
            self._life_fd = -1
            self._ended = with_exit
            if hasattr(self, "_writer"):
                self._writer.close()
        return self._ended

    async def _read(self) -> bytes:
        size = int.from_bytes(await self._reader.readexactly(4), "little")
        if size > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {size} bytes")
        return await self._reader.readexactly(size)


def _named(configs: Sequence[RewardConfig]) -> str:
    """The rewards, those that can be at fault first: only functions run code of the user's while they are imported."""
    paths = [config.path for config in configs if isinstance(config, FunctionRewardConfig)]
    return f"reward.path = {paths[0]!r}" if paths else f"reward.type = {configs[0].type!r}"
