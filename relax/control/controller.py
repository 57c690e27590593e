"""The controller: plan, start, watch, mend, stop.

start the runtime -> read the queue's events -> record them -> until the actor is done and the last evaluation is in
  watches: errors of roles, dead and silent processes, progress     mends: what failed, in place (recovery.py)
  starts everything again: when the queue or Ray is lost            ends: finished, stopped by the user, or the first error
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from relax.config.faults import FaultEvent
from relax.config.run import RunConfig
from relax.control.event_book import EventBook, RunResult
from relax.control.faults import FaultPlan
from relax.control.health import Failure, Health, find_failures
from relax.control.recovery import USER_ERRORS, Recovery, RuntimeLost, latest_checkpoint, without
from relax.control.runtime import QUEUE, Runtime
from relax.control.stall import ProgressWatch, explain_stall
from relax.errors import BusError, RelaxError, RoleError
from relax.observe.ledger_file import LedgerFile
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder
from relax.roles.actor import read_metrics

__all__ = ["Controller", "RunResult"]

_WATCH_S = 1.0
_EVENTS_S = 1.0
_ASK_S = 10.0


class Controller:
    """Runs one run to its end. `run` returns the result, or raises the first error; cancelling it stops everything.

    `first_step`: the step that a resumed run continues from. `on_started` is called once all roles run.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        runtime: Runtime,
        recorder: RunRecorder,
        progress: Progress,
        first_step: int = 0,
        on_started: Callable[[], None] | None = None,
        watch_s: float = _WATCH_S,
    ) -> None:
        self.config, self.run_dir, self.runtime = config, run_dir, runtime
        self.recorder, self.progress = recorder, progress
        self.is_started = False
        self.health = Health(config.services)
        self.book = EventBook(config, recorder, progress, self.health, first_step)
        self._first_step, self._on_started, self._watch_s = first_step, on_started, watch_s
        self._faults = FaultPlan(config, first_step)
        self._moving = ProgressWatch(time.monotonic())
        self._wake = asyncio.Event()

    @property
    def result(self) -> RunResult:
        return self.book.result

    async def run(self, resume: Path | None = None) -> RunResult:
        """Starts, watches, mends, stops."""
        try:
            self.progress.note("starting the roles")
            await self.runtime.start(self.run_dir, resume)
            self.is_started = True
            if self._on_started is not None:
                self._on_started()
            started = time.monotonic()
            self.book.begin(started)
            self._fill(resume)
            while (lost := await self._live()) is not None:
                await self._start_again(lost)
            self.result.seconds = time.monotonic() - started
            self.result.num_restarts = self.health.num_restarts
            if self._faults.left:
                self._tell_faults_that_never_came()
            LedgerFile(self.run_dir).check_complete(self.config, self._first_step)
            return self.result
        finally:
            self.progress.note("stopping")
            await asyncio.shield(self.runtime.stop())

    def _fill(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            self.book.fill(read_metrics(checkpoint))

    # -- one life of the runtime --------------------------------------------------------------------------------------
    async def _live(self) -> Failure | None:
        """Until the run is complete: nothing; until all is lost: why."""
        recovery = self._recovery()
        self._moving.moved(time.monotonic())
        async with contextlib.AsyncExitStack() as stack:
            watch = asyncio.create_task(self._watch(recovery))
            stack.push_async_callback(recovery.close)
            stack.push_async_callback(_cancel, watch)
            try:
                await self._follow_events(watch, recovery)
            except RuntimeLost as lost:
                return lost.failure
        return None

    def _recovery(self) -> Recovery:
        return Recovery(
            self.config,
            self.run_dir,
            self.runtime,
            self.health,
            self.book.position,
            self.recorder.event,
            self.progress.note,
        )

    async def _follow_events(self, watch: asyncio.Task[None], recovery: Recovery) -> None:
        seen = 0
        while not self.book.is_complete:
            if watch.done():
                watch.result()
            try:
                events = await self.runtime.bus.events(seen, _EVENTS_S)
            except BusError as error:
                raise RuntimeLost(await self._why_lost(error)) from error
            for event in events:
                seen = max(seen, int(event["seq"]))
                if self.book.take(event):
                    self._moving.moved(time.monotonic())
                if event["kind"] == "error":
                    self._wake.set()
            await self._begin_faults(recovery)

    async def _why_lost(self, error: BusError) -> Failure:
        """A lost queue may be the least of it."""
        try:
            async with asyncio.timeout(_ASK_S):
                found = [failure for failure in find_failures(await self.runtime.status(), 1e9) if failure.is_of_runtime]
        except TimeoutError:
            found = []
        return found[0] if found else Failure(QUEUE, f"the transfer queue is lost: {error}", "queue")

    async def _watch(self, recovery: Recovery) -> None:
        """Ends with an error when the run cannot go on, or when nothing has moved for too long."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._watch_s):  # `wait_for` loses a cancellation that comes with the event
                    await self._wake.wait()
            self._wake.clear()
            before = recovery.restarting
            statuses = await self.runtime.status()
            now = time.monotonic()
            recovery.check()
            if before:
                self._moving.moved(now)  # a restart has a deadline of its own
            failures = find_failures(statuses, self.config.services.answer_timeout_s)
            recovery.look(without(failures, before | recovery.restarting | self._no_longer_needed()))
            try:
                stats = await self.runtime.bus.stats()
            except BusError as error:
                raise RuntimeLost(await self._why_lost(error)) from error
            self.progress.stats(stats)
            self.recorder.stats(stats)
            self._moving.look(statuses, now)
            limit = self.config.services.progress_timeout_s
            if (stalled_s := self._moving.stalled_s(time.monotonic())) > limit:
                raise RoleError(explain_stall(statuses, stats, stalled_s, limit))

    def _no_longer_needed(self) -> frozenset[str]:
        """Who may die while the last evaluation is under way."""
        makers = {"reference", "actor_fwd", "teacher", "critic", "advantages"}
        return frozenset({"actor", *makers} if self.book.is_trained else ())

    # -- everything again ---------------------------------------------------------------------------------------------
    async def _start_again(self, lost: Failure) -> None:
        """Stops and starts the whole runtime from the last checkpoint, as a resumed run would."""
        recovery, began, cause = self._recovery(), time.monotonic(), lost.cause
        while True:
            await recovery.pause(lost.name, cause)
            await self.runtime.stop()
            step, path = latest_checkpoint(self.config, self.run_dir)
            self.book.rewind(step)
            self._fill(path)
            try:
                await self.runtime.start(self.run_dir, path)
                break
            except USER_ERRORS:
                raise
            except RelaxError as error:
                cause = str(error)
        recovery.mended(lost.name, lost.cause, began)

    # -- faults on purpose --------------------------------------------------------------------------------------------
    async def _begin_faults(self, recovery: Recovery) -> None:
        restarting = recovery.mending
        due = self._faults.due(
            self.book.position.step,
            self.health.num_failures,
            lambda name: name not in restarting and (name != QUEUE or not restarting),
        )
        for event in due:
            self.recorder.event({**event.model_dump(), "kind": "fault", "fault": event.kind})
            self.progress.note(f"fault on purpose: {event.kind} {event.target} after step {self.book.position.step}")
            await self._begin_fault(event)

    def _tell_faults_that_never_came(self) -> None:
        names = ", ".join(f"{event.kind} {event.target} (step {event.step})" for event in self._faults.left)
        text = f"{len(self._faults.left)} fault(s) on purpose never came, the run was too short: {names}"
        self.recorder.event({"kind": "warning", "role": "controller", "text": text})
        self.progress.note(text)

    async def _begin_fault(self, event: FaultEvent) -> None:
        try:
            async with asyncio.timeout(_ASK_S):
                if event.kind == "kill":
                    await self.runtime.end(event.target)
                else:
                    await self.runtime.disturb(event.target, event)
        except (TimeoutError, RelaxError) as error:
            self.progress.note(f"the fault could not begin: {error}")
            self._faults.not_begun(event)
        self._wake.set()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
