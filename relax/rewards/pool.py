"""Scores responses in worker processes that can be killed.

    score(prompt, responses) -> calls -> one queue -> each worker takes a few -> results, as they come -> score returns

A reward made of others is a tree (`tree.py`): each of its leaves is a call of its own, and what they give is combined here.

One task a worker: consumes calls from the queue, produces results, waits for the worker, unblocked by a result, by the
worker's end, or by the time limit of the call that runs. A worker that is slow, dies or talks nonsense is killed and
replaced; only the call that it was in is a reward error, and the others of its frame return to the queue.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from relax.config.reward import RewardConfig
from relax.data.media.source import Spool
from relax.errors import RewardError
from relax.rewards.media import messages_of
from relax.rewards.process import START_LIMIT_S, WorkerGone, WorkerProcess
from relax.rewards.result import RewardResult
from relax.rewards.tree import RewardTree
from relax.rewards.wire import Call, Context, Frame, Kind, Scored, pack
from relax.types import Outcome, Prompt

FRAME_S = 0.05  # a frame is meant to last so long: long enough to cost little, short enough to share work between workers
MAX_CALLS = 64  # in one frame; for an async function, how many run at once in one worker
MAX_LOSSES = 3  # workers lost with a call in hand, before the call is given up
MAX_STARTS = 4  # failed starts in a row, before the pool is given up
ASYNC_GRACE_S = 2.0  # an async function is stopped by its own event loop; this is how much later the worker is killed


@dataclass(slots=True, eq=False)
class _Job:
    """One reward of one `score` call: `results` fill up in any order."""

    reward: int  # among the tree's leaves
    is_async: bool
    context: Context
    results: list[RewardResult | None]
    done: asyncio.Future[None]
    missing: int


@dataclass(slots=True, eq=False)
class _Unit:
    """One call of the reward function: the responses `indices` of a job."""

    job: _Job
    indices: list[int]
    responses: list[str]
    losses: int = 0
    is_alone: bool = False  # its frame was lost and the culprit is not known: it gets a frame of its own

    def joins(self, is_async: bool) -> bool:
        """Whether it may share a frame with others of this kind."""
        return not self.is_alone and self.job.is_async == is_async

    def finish(self, scored: Sequence[Scored]) -> None:
        for index, item in zip(self.indices, scored, strict=True):
            self.job.results[index] = (
                RewardResult.failed(item.error) if item.error is not None else RewardResult(item.value, item.parts, Outcome.OK)
            )
        self.job.missing -= len(self.indices)
        if self.job.missing == 0 and not self.job.done.done():
            self.job.done.set_result(None)

    def fail(self, error: str) -> None:
        self.finish([Scored(error=error)] * len(self.indices))


@dataclass(slots=True)
class PoolStats:
    """Counters since the start. `busy_s`: seconds that workers spent on calls, all workers together."""

    num_scored: int = 0
    num_replaced: int = 0
    busy_s: float = 0.0
    waiting_calls: int = 0


class RewardPool:
    """`config.num_workers` processes that score responses with the reward of `config`.

    `services`: URLs of the roles that rewards may ask, by name; workers find them in their environment. `spool`: the bytes of
    media that came inside rows.

    >>> pool = RewardPool(ExactRewardConfig())                                            # doctest: +SKIP
    >>> await pool.start()                                                                # doctest: +SKIP
    >>> await pool.score(Prompt("p", text="1+1=", answer="2"), ["2", "3"])                # doctest: +SKIP
    [RewardResult(value=1.0, ...), RewardResult(value=0.0, ...)]
    >>> await pool.close()                                                                # doctest: +SKIP
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        services: Mapping[str, str] | None = None,
        spool: Spool | None = None,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._config, self._start_limit_s, self._spool = config, start_limit_s, spool
        self._services = services or {}
        self._tree = RewardTree(config)
        self._kinds: Sequence[Kind] = ()  # of the tree's leaves
        self._units: deque[_Unit] = deque()
        self._jobs: set[_Job] = set()
        self._wake = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: set[WorkerProcess] = set()
        self._call_s = 0.01  # running mean of one call's duration
        self._error: RewardError | None = None
        self.stats = PoolStats()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that live now."""
        return sorted(process.pid for process in self._processes)

    @property
    def notes(self) -> list[str]:
        """What the person who runs the job should know of the rewards, once they are started."""
        return [kind.note for kind in self._kinds if kind.note]

    async def start(self) -> None:
        """Starts the workers and imports the reward in each. Raises `ConfigError` when that fails."""
        assert not self._tasks, "started twice"
        started = await asyncio.gather(*(self._spawn() for _ in range(self._config.num_workers)), return_exceptions=True)
        failures = [item for item in started if isinstance(item, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        self._kinds = next(process.kinds for process in started if isinstance(process, WorkerProcess))
        self._tasks = [
            asyncio.create_task(self._serve(process), name=f"reward worker {number}")
            for number, process in enumerate(started)
            if isinstance(process, WorkerProcess)
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """One result for each response, in their order.

        Whatever goes wrong with a response is in its result. Raises `RewardError` only when the pool is not started, is
        closed, or cannot keep its workers alive.
        """
        if self._error is not None or not self._tasks:
            raise RewardError(str(self._error or "the reward workers are not started"))
        if not responses:
            return []
        texts = [response.encode("utf-8", "replace").decode("utf-8") for response in responses]  # half surrogate pairs
        results = await self._tree.score(prompt, texts, self._score_leaf)
        self.stats.num_scored += len(responses)
        return results

    async def _score_leaf(self, reward: int, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult]:
        """What leaf `reward` of the tree gives."""
        shown = prompt.text if prompt.text is not None else messages_of(prompt)
        media = [{"kind": item.kind, "source": item.source} for item in prompt.media]
        context = Context(shown, prompt.answer, ({"media": media} if media else {}) | dict(prompt.metadata))
        try:
            pack(context)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            text = f"{prompt.key}: its answer or metadata cannot be sent to a reward worker: {error}"
            return [RewardResult.failed(text)] * len(responses)
        kind, done = self._kinds[reward], asyncio.get_running_loop().create_future()
        job = _Job(reward, kind.is_async, context, [None] * len(responses), done, len(responses))
        indices = range(len(responses))
        units = (
            [_Unit(job, list(indices), list(responses))]
            if kind.per_group
            else [_Unit(job, [index], [responses[index]]) for index in indices]
        )
        self._jobs.add(job)
        try:
            await self._enqueue(units)
            await job.done
        finally:
            self._jobs.discard(job)
            if job.missing:  # given up by the caller, or the pool is: nobody waits for the rest
                self._units = deque(unit for unit in self._units if unit.job is not job)
        return [result for result in job.results if result is not None]

    async def close(self) -> None:
        """Ends all workers and whatever they started. Calls that still wait raise `RewardError`."""
        if self._error is None:
            self._give_up(RewardError("the reward workers are closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.kill() for process in list(self._processes)))
        self._processes.clear()

    async def _enqueue(self, units: Sequence[_Unit], *, at_front: bool = False) -> None:
        async with self._wake:
            if at_front:
                self._units.extendleft(reversed(units))
            else:
                self._units.extend(units)
            self.stats.waiting_calls = len(self._units)
            self._wake.notify_all()

    async def _spawn(self) -> WorkerProcess:
        process = await WorkerProcess.start(self._tree.leaves, self._start_limit_s, self._services, self._spool)
        self._processes.add(process)
        return process

    async def _serve(self, process: WorkerProcess) -> None:
        """Hands frames to one worker after another, in the place of one."""
        while True:
            units = await self._take()
            try:
                await self._exchange(process, units)
            except WorkerGone as gone:
                await process.kill()
                self._processes.discard(process)
                self.stats.num_replaced += 1
                await self._settle_loss(process, units, str(gone))
                replacement = await self._replace()
                if replacement is None:
                    return
                process = replacement

    async def _take(self) -> list[_Unit]:
        """The next frame: a fair share of what waits, of about `FRAME_S` seconds; all of it async or none."""
        async with self._wake:
            await self._wake.wait_for(lambda: self._units)
            first = self._units.popleft()
            if first.is_alone:
                return [first]
            share = -(-(len(self._units) + 1) // self._config.num_workers)
            is_async = first.job.is_async
            limit = min(share, MAX_CALLS if is_async else max(1, min(MAX_CALLS, int(FRAME_S / max(self._call_s, 1e-6)))))
            units = [first]
            while len(units) < limit and self._units and self._units[0].joins(is_async):
                units.append(self._units.popleft())
            self.stats.waiting_calls = len(self._units)
            return units

    async def _exchange(self, process: WorkerProcess, units: list[_Unit]) -> None:
        """Sends one frame and waits for all its results; units are set to finished as they come."""
        contexts: dict[int, int] = {}
        frame = Frame([], [])
        for unit in units:
            number = contexts.setdefault(id(unit.job), len(frame.contexts))
            if number == len(frame.contexts):
                frame.contexts.append(unit.job.context)
            frame.calls.append(Call(number, unit.job.reward, unit.responses))
        began, is_async = time.monotonic(), units[0].job.is_async
        process.send(frame)
        open_units = dict(enumerate(units))
        grace_s = ASYNC_GRACE_S if is_async else 0.0
        try:
            while open_units:
                for result in await process.results(self._config.time_limit_s, grace_s):
                    if result.number not in open_units or len(result.scored) != len(units[result.number].indices):
                        raise WorkerGone("the reward worker answered what it was not asked")
                    open_units.pop(result.number).finish(result.scored)
        finally:
            units[:] = list(open_units.values())
            spent = time.monotonic() - began
            self.stats.busy_s += spent
            self._call_s += 0.2 * (spent / len(frame.calls) - self._call_s)
            process.running = open_units.get(process.running_number)

    async def _settle_loss(self, process: WorkerProcess, units: Sequence[_Unit], why: str) -> None:
        """After a worker was lost: the call that it was in is an error, the others that are open return to the queue."""
        culprit = process.running if isinstance(process.running, _Unit) else None
        is_async = bool(units) and units[0].job.is_async
        if is_async and len(units) > 1:
            culprit = None  # all were running at once
        again = []
        for unit in units:
            unit.losses += 1
            unit.is_alone = unit.is_alone or (is_async and culprit is None)
            if unit is culprit or unit.losses >= MAX_LOSSES:
                unit.fail(why)
            else:
                again.append(unit)
        await self._enqueue(again, at_front=True)

    async def _replace(self) -> WorkerProcess | None:
        for attempt in range(MAX_STARTS):
            await asyncio.sleep(0.0 if attempt == 0 else 0.1 * 4**attempt)
            try:
                return await self._spawn()
            except Exception as error:  # noqa: BLE001 - the last one is raised by every waiting `score`
                failure = error
        self._give_up(RewardError(f"the reward worker could not be replaced: {failure}"))
        return None

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._give_up(RewardError(f"the reward pool failed: {type(error).__name__}: {error}"))

    def _give_up(self, error: RewardError) -> None:
        self._error = error
        self._units.clear()
        for job in self._jobs:
            if not job.done.done():
                job.done.set_exception(error)
