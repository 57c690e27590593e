"""The controller: plan, start, watch, stop.

start the runtime -> read the queue's events -> record them -> until the actor is done and the last evaluation is in
  watches: errors of roles, dead processes, progress        ends: finished, stopped by the user, or the first error
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.config.run import RunConfig
from relax.control.runtime import Runtime
from relax.control.step_row import StepRow
from relax.errors import BusError, RoleError
from relax.observe.progress import Progress
from relax.observe.recorder import RunRecorder

_WATCH_S = 2.0
_EVENTS_S = 1.0


@dataclass(slots=True)
class RunResult:
    """What a run came to: last step, reward of the first and last step, held-out accuracy by step."""

    step: int = 0
    first_reward: float | None = None
    last_reward: float | None = None
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0


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
    ) -> None:
        self.config, self.run_dir, self.runtime = config, run_dir, runtime
        self.recorder, self.progress = recorder, progress
        self.result = RunResult(first_step)
        self.is_started = False
        self._on_started = on_started
        self._row = StepRow()
        self._is_trained = False
        self._is_evaluated = config.eval is None
        self._last_progress = time.monotonic()

    async def run(self, resume: Path | None = None) -> RunResult:
        """Starts, watches, stops."""
        try:
            self.progress.note("starting the roles")
            await self.runtime.start(self.run_dir, resume)
            self.is_started = True
            if self._on_started is not None:
                self._on_started()
            started = time.monotonic()
            self._row.begin(started)
            self._last_progress = started
            async with contextlib.AsyncExitStack() as stack:
                watch = asyncio.create_task(self._watch())
                stack.push_async_callback(_cancel, watch)
                await self._follow_events(watch)
            self.result.seconds = time.monotonic() - started
            return self.result
        finally:
            self.progress.note("stopping")
            await asyncio.shield(self.runtime.stop())

    async def _follow_events(self, watch: asyncio.Task[None]) -> None:
        seen = 0
        while not (self._is_trained and self._is_evaluated):
            if watch.done():
                watch.result()
            try:
                events = await self.runtime.bus.events(seen, _EVENTS_S)
            except BusError as error:
                raise RoleError(f"the transfer queue is lost: {error}") from error
            for event in events:
                seen = max(seen, int(event["seq"]))
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "step":
            self._step(event["metrics"])
        elif kind == "rollout":
            if self._row.rollout(event):
                self._last_progress = time.monotonic()
        elif kind == "publication":
            self._row.publication(event)
        elif kind == "samples":
            self.recorder.samples(int(event["step"]) + 1, event["rows"])
        elif kind == "eval":
            self._evaluation(event["metrics"])
        elif kind == "error":
            raise RoleError(str(event["error"]))
        elif kind == "done":
            self._is_trained = True
        elif kind == "warning":
            self.progress.note(f"{event['role']}: {event['text']}")
        if kind not in ("step", "samples", "rollout"):
            self.recorder.event(event)

    def _step(self, metrics: Mapping[str, Any]) -> None:
        self._last_progress = time.monotonic()
        row = self._row.finish(metrics, self._last_progress)
        self.recorder.step(row)
        self.progress.update(row)
        self.result.step = int(row["step"])
        self.result.last_reward = row["reward/mean"]
        if self.result.first_reward is None:
            self.result.first_reward = row["reward/mean"]

    def _evaluation(self, metrics: Mapping[str, Any]) -> None:
        self._last_progress = time.monotonic()
        self.recorder.evaluation(metrics)
        self.progress.evaluation(metrics)
        step = int(metrics["step"])
        if "eval/accuracy" in metrics:
            self.result.evaluations.append((step, float(metrics["eval/accuracy"])))
        if step >= self.config.train.num_steps:
            self._is_evaluated = True

    async def _watch(self) -> None:
        """Ends with an error when a role failed or died, or when nothing has moved for too long."""
        limit = self.config.services.progress_timeout_s
        while True:
            await asyncio.sleep(_WATCH_S)
            roles = await self.runtime.status()
            failed = [status["error"] for status in roles.values() if status.get("error")]
            if failed:
                raise RoleError(failed[0])
            idle = [name for name, status in roles.items() if status.get("activity") == "not started"]
            if idle:
                raise RoleError(f"the process of {', '.join(idle)} died (killed, or out of memory)")
            stats = await self.runtime.bus.stats()
            self.progress.stats(stats)
            self.recorder.stats(stats)
            stalled_s = time.monotonic() - self._last_progress
            if stalled_s > limit:
                doing = "; ".join(f"{name}: {status.get('activity')}" for name, status in roles.items())
                raise RoleError(
                    f"no step ended and no sample arrived for {stalled_s:.0f} s (services.progress_timeout_s = {limit:g}). "
                    f"Roles: {doing}. Queue waits: {stats.get('waits')}"
                )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
