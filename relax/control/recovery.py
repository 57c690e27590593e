"""Restarts what died or failed, in place, while everything else goes on.

failure --budget, backoff--> (actor: back to the last checkpoint) --> restart --fails--> the next attempt
                                                                        '--runs--> an event, a line for the user
what all of them need (the queue, Ray) is lost: `RuntimeLost`, and the controller starts everything again
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.clock import Clock, MonotonicClock
from relax.config.run import RunConfig
from relax.control.health import Failure, Health
from relax.control.runtime import QUEUE, Runtime
from relax.errors import BusError, ConfigError, DataError, ModelError, RelaxError, RewardError, RoleError
from relax.train.checkpoint import CheckpointStore
from relax.weights.shared_memory import cleanup_stale

USER_ERRORS = (ConfigError, DataError, ModelError, RewardError)
"""Raised by a start: another attempt would end in the same way."""

_ACTOR, _ROLLOUT = "actor", "rollout"


class RuntimeLost(RelaxError):
    """The queue or Ray is gone: nothing can be restarted in place."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


@dataclass(slots=True)
class Position:
    """Where the run stands: finished steps, and the newest step that was evaluated, if any."""

    step: int = 0
    evaluated: int | None = None


class Recovery:
    """One life of a runtime: each failure is mended by a task of its own, with a deadline for each attempt.

    `record` takes the event of each recovery, `note` lines for the user.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        runtime: Runtime,
        health: Health,
        position: Position,
        record: Callable[[dict[str, Any]], None],
        note: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._config, self._run_dir, self._runtime = config, run_dir, runtime
        self._health, self._position = health, position
        self._record, self._note = record, note
        self._clock = clock or MonotonicClock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def restarting(self) -> frozenset[str]:
        """What is being mended now."""
        return frozenset(self._tasks)

    @property
    def mending(self) -> frozenset[str]:
        """The same without what is mended already, and only waits to be looked at."""
        return frozenset(name for name, task in self._tasks.items() if not task.done())

    def look(self, failures: Sequence[Failure]) -> None:
        """Begins to mend what is wrong. Raises `RoleError` when it is the user's to mend, `RuntimeLost` when all is lost."""
        for failure in failures:
            if failure.is_of_runtime:
                raise RuntimeLost(failure)
            if failure.kind == "user":
                raise RoleError(failure.cause)
            self._begin(failure)

    def check(self) -> None:
        """Raises what ended a restart for good."""
        for name, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[name]
                task.result()

    async def close(self) -> None:
        """Gives up what is being mended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    def _begin(self, failure: Failure) -> None:
        if failure.name not in self._tasks:
            self._tasks[failure.name] = asyncio.create_task(self._mend(failure), name=f"relax-recovery-{failure.name}")

    async def _mend(self, failure: Failure) -> None:
        name, cause, began = failure.name, failure.cause, self._clock.now()
        if failure.kind == "bus":
            await self._check_queue()
        while True:
            await self.pause(name, cause)
            try:
                async with asyncio.timeout(self._config.services.start_timeout_s):
                    await (self._rewind() if name == _ACTOR else self._restart(name))
                break
            except USER_ERRORS:
                raise
            except TimeoutError:
                limit = self._config.services.start_timeout_s
                cause = f"{name} did not start again within services.start_timeout_s = {limit:g} s"
            except RelaxError as error:
                cause = str(error)
                if isinstance(error, BusError):
                    await self._check_queue()
        self.mended(name, failure.cause, began)

    async def pause(self, name: str, cause: str) -> None:
        """Counts a failure and waits until the restart. Raises `RoleError` with the first error when the budget is used up."""
        seconds = self._health.failed(name, cause)
        attempt = self._health.attempt(name)
        if seconds is None:
            first, most = self._health.first_error(name), self._config.services.max_restarts
            times = f" ({attempt} failures in a row; services.max_restarts = {most})" if most else ""
            raise RoleError(first + times)
        again = f" in {seconds:g} s" if seconds else ""
        self._note(f"{cause}: {name} is restarted{again} (attempt {attempt} of {self._config.services.max_restarts})")
        await self._clock.sleep(seconds)

    def mended(self, name: str, cause: str, began: float) -> None:
        """It runs again."""
        self._health.restarted(name)
        down_s = round(self._clock.now() - began, 3)
        event = {"kind": "recovery", "role": name, "cause": cause, "attempt": self._health.attempt(name)}
        self._record({**event, "down_s": down_s, "step": self._position.step})
        self._note(f"{name} runs again after {down_s:.1f} s")

    async def _check_queue(self) -> None:
        try:
            await self._runtime.bus.stats()
        except BusError as error:
            raise RuntimeLost(Failure(QUEUE, f"the transfer queue is lost: {error}", "queue")) from error

    async def _restart(self, name: str) -> None:
        """A role takes up where the run stands; the rollout where the last evaluation was, and has one more at the start if
        there was none."""
        step, evaluated = self._position.step, self._position.evaluated
        found = latest_checkpoint(self._config, self._run_dir)
        if name == _ROLLOUT:
            step = step if evaluated is None else evaluated
        is_restart = name != _ROLLOUT or evaluated is not None
        await self._runtime.restart(name, found[1], step, is_restart=is_restart)

    async def _rewind(self) -> None:
        """The actor goes back to its last checkpoint, or to the start: what was trained since never happened."""
        await self._runtime.end(_ACTOR)  # nothing of it may write any more
        step, path = latest_checkpoint(self._config, self._run_dir)
        bus = self._runtime.bus
        was_finished = bool((await bus.stats()).get("is_finished"))
        await bus.rewind(step)
        await bus.emit({"kind": "rewind", "step": step})  # in the stream, behind the last event of the lost future
        await asyncio.to_thread(cleanup_stale)
        self._position.step = step
        if self._position.evaluated is not None:
            self._position.evaluated = min(self._position.evaluated, step)
        self._note(
            f"the actor goes back to {f'the checkpoint of step {step}' if path else 'the start: there is no checkpoint'}"
        )
        if was_finished and step < self._config.train.num_steps:  # then the rollout's work had ended
            self._begin(Failure(_ROLLOUT, "the actor goes back to steps for which its work had ended", "crash"))
        await self._runtime.restart(_ACTOR, path, step, is_restart=True)


def latest_checkpoint(config: RunConfig, run_dir: Path) -> tuple[int, Path | None]:
    """(step, folder) of the newest complete checkpoint; (0, None) when there is none."""
    found = CheckpointStore(run_dir / "checkpoints", config.train.checkpoint.keep).latest()
    return found if found is not None else (0, None)


def without(failures: Sequence[Failure], names: Collection[str]) -> list[Failure]:
    """The failures of others than `names`."""
    return [failure for failure in failures if failure.name not in names]
