"""Decodes prompts' media in processes that can be killed, before they are needed.

    expect(next prompts) -> one thread a worker sends jobs and waits -> arrays in shared memory -> prepare(prompt) returns

A worker that dies loses the prompt it was in, which is tried once more; one that is in a prompt for too long is killed. What
is held in memory is bounded: the prompts looked ahead for, one for each worker, and what callers keep.
"""

import asyncio
import importlib.util
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from relax.config.media import MediaConfig
from relax.data.media.decoded import Audio, Decoded, Image, Video
from relax.data.media.process import MediaWorker, WorkerLost, setup_message
from relax.data.media.source import Spool
from relax.data.media.wire import Job
from relax.errors import ConfigError, DataError
from relax.types import Prompt

MAX_TRIES = 2
PACKAGES = ("av", "PIL", "soxr")
INSTALL = "pip install 'relax-rl[media]'"


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt's media: `items` in their order or, where the pool has a processor, the `features` that it made of them.

    Arrays are read-only, in shared memory that is freed with the last of them.
    """

    items: tuple[Decoded, ...] = ()
    features: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class MediaStats:
    """Counters since the start. `num_bytes`: of decoded arrays; `num_piped_bytes`: sent to workers, where files are named."""

    num_prepared: int = 0
    num_lost_workers: int = 0
    num_bytes: int = 0
    num_piped_bytes: int = 0


class MediaPool:
    """`config.num_workers` processes that decode. One event loop uses it.

    `spool`: bytes that came inside rows (`PromptSource.spool`). `processor`: dotted path of a function called once in each
    worker with `options`; it returns a callable `(messages, items) -> {name: array}`.

    >>> pool = MediaPool(config, spool=source.spool)                                       # doctest: +SKIP
    >>> await pool.start()                                                                 # doctest: +SKIP
    >>> pool.expect([source.prompt(issue) for issue in range(1, 9)])                       # doctest: +SKIP
    >>> (await pool.prepare(source.prompt(0))).items[0].pixels.shape                       # doctest: +SKIP
    (480, 640, 3)
    """

    def __init__(
        self,
        config: MediaConfig,
        *,
        spool: Spool | None = None,
        processor: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = config
        self._spool = spool or Spool()
        self._setup = setup_message(config, processor, options or {})
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="media")
        self._idle: queue.SimpleQueue[MediaWorker | None] = queue.SimpleQueue()  # None: to be started
        self._workers: set[MediaWorker] = set()
        self._ahead: dict[str, Future[Prepared]] = {}
        self._is_closed = False
        self._counting = threading.Lock()
        self.stats = MediaStats()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that live now."""
        return sorted(worker.pid for worker in list(self._workers))

    async def start(self) -> None:
        """Starts the workers. Raises `ConfigError` when packages are missing or a transform or processor cannot be set up."""
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"images, audio and video need packages that are missing ({', '.join(missing)}): {INSTALL}")
        started = await asyncio.gather(
            *(asyncio.to_thread(self._spawn) for _ in range(self._config.num_workers)), return_exceptions=True
        )
        failures = [item for item in started if isinstance(item, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        for worker in started:
            self._idle.put(worker if isinstance(worker, MediaWorker) else None)

    def expect(self, prompts: Sequence[Prompt]) -> None:
        """Says what will be asked for next, in this order. Of these the first `look_ahead` are begun; prompts of an earlier
        call that are not among them are dropped."""
        wanted = {prompt.key: prompt for prompt in prompts if prompt.media}
        wanted = dict(list(wanted.items())[: self._config.look_ahead])
        for key in self._ahead.keys() - wanted.keys():
            self._ahead.pop(key).cancel()
        for key, prompt in wanted.items():
            if key not in self._ahead:
                self._ahead[key] = self._submit(prompt)

    async def prepare(self, prompt: Prompt) -> Prepared:
        """The prompt's media, at once where they were expected and are done.

        Raises `DataError` that names the row, the item and what is wrong with it.
        """
        if not prompt.media:
            return Prepared()
        future = self._ahead.pop(prompt.key) if prompt.key in self._ahead else self._submit(prompt)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Ends the workers. Prompts that still wait raise `DataError`."""
        self._is_closed = True
        self.expect([])
        await asyncio.gather(*(asyncio.to_thread(worker.kill) for worker in list(self._workers)))
        self._workers.clear()
        await asyncio.to_thread(self._threads.shutdown)

    def _submit(self, prompt: Prompt) -> Future[Prepared]:
        if self._is_closed:
            raise DataError("the media pool is closed")
        return self._threads.submit(self._work, prompt)

    def _work(self, prompt: Prompt) -> Prepared:
        """Runs in a thread. There are as many threads as workers, so one is always idle."""
        messages = [dict(message) for message in prompt.messages] if self._setup.processor is not None else []
        job = Job(prompt.key, messages, list(prompt.media))
        worker, how = self._idle.get(), ""
        try:
            for _ in range(MAX_TRIES):
                if self._is_closed:
                    raise DataError(f"{prompt.key}: the media pool was closed before its media were decoded")
                try:
                    worker = worker or self._spawn()
                    return self._run(worker, job)
                except (ConfigError, WorkerLost, TimeoutError) as lost:  # ConfigError: lost before it was ready
                    self._forget(worker)
                    worker, how = None, str(lost)
                    if isinstance(lost, TimeoutError):
                        limit = f"media.time_limit_s = {self._config.time_limit_s:g}"
                        raise DataError(f"{prompt.key}: its media were not decoded within {limit}") from None
            raise DataError(f"{prompt.key}: the process that decoded its media was lost {MAX_TRIES} times ({how})")
        finally:
            self._idle.put(worker)

    def _run(self, worker: MediaWorker, job: Job) -> Prepared:
        before = worker.num_piped_bytes
        values, arrays = worker.run(job, self._config.time_limit_s)
        with self._counting:
            self.stats.num_prepared += 1
            self.stats.num_bytes += sum(array.nbytes for array in arrays.values())
            self.stats.num_piped_bytes += worker.num_piped_bytes - before
        if self._setup.processor is not None:
            return Prepared(features=arrays)
        return Prepared(tuple(_item(item.kind, f"{number}.", values, arrays) for number, item in enumerate(job.media)))

    def _spawn(self) -> MediaWorker:
        worker = MediaWorker(self._setup, self._spool.fd)
        self._workers.add(worker)
        if self._is_closed:
            worker.kill()
        return worker

    def _forget(self, worker: MediaWorker | None) -> None:
        if worker is not None:
            worker.kill()
            self._workers.discard(worker)
        with self._counting:
            self.stats.num_lost_workers += 1


def _item(kind: str, prefix: str, values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Decoded:
    if kind == "image":
        return Image(arrays[f"{prefix}pixels"])
    has_audio = f"{prefix}samples" in arrays
    audio = Audio(arrays[f"{prefix}samples"], values[f"{prefix}sampling_rate"]) if has_audio else None
    if kind == "audio":
        assert audio is not None
        return audio
    return Video(arrays[f"{prefix}frames"], arrays[f"{prefix}times"], values[f"{prefix}fps"], audio)
