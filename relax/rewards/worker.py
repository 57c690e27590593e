"""The process in which rewards are computed: `python -m relax.rewards.worker CHANNEL LIFE PROGRESS [SPOOL]` (file descriptors).

    parent --- frames of calls ---> CHANNEL --- frames of results, as they come ---> parent
    parent <--- PROGRESS (shared memory): which call runs, and since when ---
    LIFE closes with the parent; the kernel then ends this process and what it started, whatever it is doing
    SPOOL: bytes of media that came inside rows

Imports neither torch nor ray. Standard output is sent to standard error, so that a print in a reward function cannot
disturb the frames.
"""

import asyncio
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from relax.child import die_with_parent
from relax.config.reward import RewardConfig
from relax.errors import ConfigError, RelaxError
from relax.rewards.media import use_spool
from relax.rewards.result import read_return_value
from relax.rewards.table import Scorer, make_scorer
from relax.rewards.waiting import begin_wait
from relax.rewards.wire import (
    PROGRESS,
    Call,
    CallResult,
    Frame,
    Kind,
    Ready,
    Refused,
    Results,
    Scored,
    Setup,
    T,
    pack,
    past_limit,
    unpack,
)

FLUSH_S = 0.005  # results are sent this often while calls are quick


def main(argv: list[str]) -> None:
    """Imports the rewards that the parent names, says whether that went well, and scores until the channel closes."""
    channel_fd, life_fd, progress_fd, *spool_fd = fds = [int(text) for text in argv]
    for fd in fds:
        os.set_inheritable(fd, False)  # what a reward starts must not keep them open
    if spool_fd:
        use_spool(spool_fd[0])
    os.dup2(2, 1)
    die_with_parent(life_fd)
    channel = socket.socket(fileno=channel_fd)
    progress = mmap.mmap(progress_fd, PROGRESS.size)
    setup = receive(channel, Setup)
    if setup is None:
        return
    sys.path.extend(path for path in setup.sys_path if path not in sys.path)
    scorers, time_limit_s = [], 0.0
    for raw in setup.rewards:
        try:
            config: RewardConfig = TypeAdapter[RewardConfig](RewardConfig).validate_python(raw)
            scorers.append(make_scorer(config))
            time_limit_s = config.time_limit_s
        except ConfigError as error:
            channel.sendall(pack(Refused(str(error))))
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to the parent, which raises it
            channel.sendall(pack(Refused(f'reward.type = "{raw.get("type")}": {describe(error)}')))
            return
    channel.sendall(pack(Ready([Kind(scorer.is_async, scorer.per_group, scorer.note) for scorer in scorers])))
    Worker(channel, progress, scorers, time_limit_s).run()


class Worker:
    """Computes one frame after another: calls in turn, or all calls of a frame at once when the function is async."""

    def __init__(self, channel: socket.socket, progress: mmap.mmap, scorers: Sequence[Scorer], time_limit_s: float) -> None:
        self._channel, self._progress, self._scorers, self._time_limit_s = channel, progress, scorers, time_limit_s
        self._done: list[CallResult] = []
        self._flushed = 0.0

    def run(self) -> None:
        with asyncio.Runner() as runner:
            while (frame := receive(self._channel, Frame)) is not None:
                self._flushed = time.monotonic()
                if any(self._scorers[call.reward].is_async for call in frame.calls):
                    runner.run(self._run_async(frame))
                else:
                    self._run_in_turn(frame)
                self._flush()

    def _run_in_turn(self, frame: Frame) -> None:
        for number, call in enumerate(frame.calls):
            self._mark(number)
            self._finish(CallResult(number, self._guarded(call, self._invoke, frame)))

    async def _run_async(self, frame: Frame) -> None:
        async def one(number: int, call: Call) -> None:
            limit, wait = asyncio.timeout(self._time_limit_s), begin_wait()
            try:
                async with limit:
                    raw = await self._invoke(call, frame)
                result = self._guarded(call, lambda *_: raw, frame)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - an outcome of these responses
                text = past_limit(self._time_limit_s, wait.why) if limit.expired() else describe(error)
                result = [Scored(error=text)] * len(call.responses)
            self._finish(CallResult(number, result))

        self._mark(0)
        await asyncio.gather(*(one(number, call) for number, call in enumerate(frame.calls)))

    def _invoke(self, call: Call, frame: Frame) -> Any:
        context, scorer = frame.contexts[call.context], self._scorers[call.reward]
        second = list(call.responses) if scorer.per_group else call.responses[0]
        return scorer.call(context.prompt, second, context.answer, context.metadata)

    def _guarded(self, call: Call, get: Callable[[Call, Frame], Any], frame: Frame) -> list[Scored]:
        """What `get` returns, read as rewards. Whatever goes wrong is an outcome of these responses, not of the worker."""
        try:
            raw = get(call, frame)
            if not self._scorers[call.reward].per_group:
                return [scored(raw)]
            if hasattr(raw, "tolist"):
                raw = raw.tolist()  # an array or tensor
            if not isinstance(raw, list | tuple):
                raise TypeError(f"a reward per group must return a list of numbers, and returned {type(raw).__name__}")
            if len(raw) != len(call.responses):
                raise ValueError(f"the reward returned {len(raw)} values for {len(call.responses)} responses")
            return [scored(item) for item in raw]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an outcome of these responses
            return [Scored(error=describe(error))] * len(call.responses)

    def _mark(self, number: int) -> None:
        PROGRESS.pack_into(self._progress, 0, time.monotonic(), number + 1)

    def _finish(self, result: CallResult) -> None:
        self._done.append(result)
        if time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._done:
            self._channel.sendall(pack(Results(self._done)))
            self._done = []


def scored(raw: Any) -> Scored:
    """One return value as a message."""
    try:
        value, parts = read_return_value(raw)
    except RelaxError as error:
        return Scored(error=str(error))
    return Scored(value, parts)


def describe(error: BaseException) -> str:
    """The error in one line, with the place in the user's file where it was raised; errors of relax name their own."""
    traceback, place = None if isinstance(error, RelaxError) else error.__traceback__, ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename != __file__:
            place = f" ({Path(code.co_filename).name}, line {traceback.tb_lineno}, in {code.co_name})"
        traceback = traceback.tb_next
    text = str(error).strip().split("\n")[0][:500]
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def receive(channel: socket.socket, kind: type[T]) -> T | None:
    """The next message; None when the parent closed the channel."""
    head = _read(channel, 4)
    body = None if head is None else _read(channel, int.from_bytes(head, "little"))
    return None if body is None else unpack(body, kind)


def _read(channel: socket.socket, size: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = channel.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


if __name__ == "__main__":
    main(sys.argv[1:])
