"""What a role is: a plain async object that is started, runs until its work is done, and is stopped. No Ray in here."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from relax.bus.transfer_queue import Lease, TransferQueue
from relax.config.run import RunConfig
from relax.engines.engine import Engine
from relax.errors import BusGone, RelaxError, WaitTimeout
from relax.train.backend import TrainBackend

# What makes the back end and the engines that roles compute with; tests hand in ones that compute nothing.
MakeBackend = Callable[[RunConfig], TrainBackend]
MakeEngine = Callable[[RunConfig, str], Engine]

_CLAIM_S = 60.0  # how often a wait's reason is renewed

log = logging.getLogger("relax.roles")


class Role:
    """Base of the roles. A role talks to the transfer queue and to nothing else; `run` returns when the run is complete.

    `waited_s` counts the seconds that the role spent waiting for others; `activity` says in words what it does now.
    """

    def __init__(self, name: str, config: RunConfig, bus: TransferQueue) -> None:
        self.name, self.config, self.bus = name, config, bus
        self.waited_s = 0.0
        self.activity = "starting"

    async def start(self) -> None:
        """Loads what the role needs. The run goes on when every role has started."""

    async def run(self) -> None:
        """Does the role's work until the run is complete; raises when it cannot go on."""
        raise AssertionError(f"role {self.name} has no work")

    async def stop(self) -> None:
        """Frees what `start` took."""

    async def claim(self, columns: Sequence[str], *, num_groups: int, step: int | None = None) -> Lease:
        """Groups that are ready for this role, as `TransferQueue.claim`; waits as long as it takes and says for what."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while True:
                try:
                    return await self.bus.claim(
                        self.name, columns, num_groups=num_groups, wait_s=_CLAIM_S, step=step, consumer=self.name
                    )
                except WaitTimeout as timeout:
                    self.activity = f"waiting for {timeout.reason}"
        finally:
            self.waited_s += loop.time() - started

    def status(self) -> dict[str, Any]:
        """JSON values for `GET /{role}/status`."""
        return {"role": self.name, "activity": self.activity, "waited_s": round(self.waited_s, 3)}


class RoleTask:
    """A role and the task that runs it: started once, reports its failure to the transfer queue, stopped once."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._task: asyncio.Task[None] | None = None
        self._error: str | None = None

    async def start(self) -> None:
        await self.role.start()

    def run(self) -> None:
        """Starts the role's work in the background; calling it again does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._guarded(), name=f"relax-{self.role.name}")

    async def _guarded(self) -> None:
        try:
            await self.role.run()
            self.role.activity = "done"
        except asyncio.CancelledError:
            raise
        except BusGone as error:
            self._error = f"{self.role.name}: {error}"
            log.warning("%s: the transfer queue is gone: %s", self.role.name, error)
        except Exception as error:  # the boundary: whatever a role raises ends the run with that error
            self._error = _reason(self.role.name, error)
            self.role.activity = "failed"
            log.exception("role %s failed", self.role.name)
            await self.role.bus.emit({"kind": "error", "role": self.role.name, "error": self._error})

    def status(self) -> dict[str, Any]:
        running = self._task is not None and not self._task.done()
        return self.role.status() | {"running": running, "error": self._error}

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.role.stop()


def _reason(role: str, error: Exception) -> str:
    """The error for the person who runs the job: relax's own are written for them, others need their kind."""
    text = str(error) if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}"
    return text if text.startswith(f"{role}: ") else f"{role}: {text}"
