"""What a role is: a plain async object that is started, runs until its work is done, and is stopped. No Ray in here."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax.bus.transfer_queue import Lease, TransferQueue
from relax.config.run import RunConfig
from relax.engines.engine import Engine
from relax.errors import (
    BusError,
    BusGone,
    ConfigError,
    DataError,
    ModelError,
    RelaxError,
    RewardError,
    RoleError,
    StaleHandle,
    TeacherError,
    WaitTimeout,
)
from relax.train.backend import TrainBackend

# What makes the back end and the engines that roles compute with; tests hand in ones that compute nothing.
MakeBackend = Callable[[RunConfig], TrainBackend]
MakeEngine = Callable[[RunConfig, str], Engine]

Reply = tuple[int, Mapping[str, Any]]
"""What a role says to a request: an HTTP status, and JSON values."""

_CLAIM_S = 60.0  # how often a wait's reason is renewed
# another attempt would end in the same way
_USER_ERRORS = (ConfigError, DataError, ModelError, RewardError, RoleError, TeacherError)

log = logging.getLogger("relax.roles")


class Role:
    """Base of the roles. A role talks to the transfer queue and to nothing else; `run` returns when the run is complete.

    `waited_s` counts the seconds that the role spent waiting for others; `activity` says in words what it does now;
    `progress` rises whenever something useful was done. What was claimed stays the role's, however long it takes, until it is
    settled.
    """

    def __init__(self, name: str, config: RunConfig, bus: TransferQueue) -> None:
        self.name, self.config, self.bus = name, config, bus
        self.waited_s = 0.0
        self.activity = "starting"
        self.progress = 0
        self._open: set[str] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads what the role needs. The run goes on when every role has started."""

    async def run(self) -> None:
        """Does the role's work until the run is complete; raises when it cannot go on."""
        raise AssertionError(f"role {self.name} has no work")

    async def stop(self) -> None:
        """Frees what `start` took."""

    async def answer(self, method: str, page: str, body: bytes) -> Reply:
        """Says something to a request to `/{role}/{page}`; what is wrong with a request is said as well, never raised."""
        return 404, {"error": f"no such page: GET /{self.name}/status"}

    async def claim(
        self,
        columns: Sequence[str],
        *,
        num_groups: int,
        at_least: int = 1,
        step: int | None = None,
        shared: bool = False,
    ) -> Lease:
        """Groups that are ready for this role, as `TransferQueue.claim`; waits as long as it takes and says for what."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while True:
                try:
                    lease = await self.bus.claim(
                        self.name,
                        columns,
                        num_groups=num_groups,
                        at_least=at_least,
                        wait_s=_CLAIM_S,
                        step=step,
                        consumer=self.name,
                        shared=shared,
                    )
                    break
                except WaitTimeout as timeout:
                    self.activity = f"waiting for {timeout.reason}"
        finally:
            self.waited_s += loop.time() - started
        self._open.add(lease.lease_id)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(lease.deadline_s / 3), name=f"relax-{self.name}-leases")
        return lease

    async def settle(self, leases: Sequence[Lease], step: int | None = None) -> None:
        """Acknowledges leases, with `step` as the end of that step."""
        ids = [lease.lease_id for lease in leases]
        try:
            await self.bus.ack(ids, step=step)
        finally:
            self._open.difference_update(ids)
        self.progress += 1

    def forget(self, lease: Lease) -> None:
        """The lease is not the role's any more."""
        self._open.discard(lease.lease_id)

    async def _keep(self, every_s: float) -> None:
        """Renews what is claimed: a long computation is no reason to give the same rows to another consumer."""
        while True:
            await asyncio.sleep(every_s)
            if self._open:
                with contextlib.suppress(StaleHandle):  # the trainer went back meanwhile; whoever settles the lease finds out
                    await self.bus.renew(sorted(self._open))

    async def let_leases_go(self) -> None:
        """Ends the renewals; called once the role's work has ended."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        """JSON values for `GET /{role}/status`."""
        return {
            "role": self.name,
            "activity": self.activity,
            "waited_s": round(self.waited_s, 3),
            "progress": self.progress,
            "leases": sorted(self._open),
        }


class RoleTask:
    """A role and the task that runs it: started once, reports its failure to the transfer queue, stopped once."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._task: asyncio.Task[None] | None = None
        self._error: str | None = None
        self._error_kind: str | None = None

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
            self._fail("bus", f"{self.role.name}: {error}")
            log.warning("%s: the transfer queue is gone: %s", self.role.name, error)
        except Exception as error:  # the boundary: whatever a role raises is told to the controller
            error = _first(error)
            self._fail("user" if isinstance(error, _USER_ERRORS) else "crash", _reason(self.role.name, error))
            log.exception("role %s failed", self.role.name)
            with contextlib.suppress(BusError):  # the status says it too
                await self.role.bus.emit(
                    {"kind": "error", "role": self.role.name, "error": self._error, "error_kind": self._error_kind}
                )

    def _fail(self, kind: str, error: str) -> None:
        self._error, self._error_kind, self.role.activity = error, kind, "failed"

    def status(self) -> dict[str, Any]:
        """The role's own, and whether it runs. `error_kind`: "user" (trying again would not help), "crash" or "bus"."""
        running = self._task is not None and not self._task.done()
        own = {"running": running, "error": self._error, "error_kind": self._error_kind, "pid": os.getpid()}
        return self.role.status() | own

    async def answer(self, method: str, page: str, body: bytes) -> Reply:
        """The status, or what the role itself says to a request."""
        if (method, page) == ("GET", "status"):
            return 200, self.status()
        try:
            return await self.role.answer(method, page, body)
        except Exception as error:  # the boundary: the request fails, the role goes on
            log.exception("%s: %s %s", self.role.name, method, page)
            return 500, {"error": _reason(self.role.name, error)}

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.role.let_leases_go()
        await self.role.stop()


def _first(error: Exception) -> Exception:
    """The first error of a task group, or the error itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(role: str, error: Exception) -> str:
    """The error for the person who runs the job: relax's own are written for them, others need their kind."""
    text = str(error) if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}"
    return text if text.startswith(f"{role}: ") else f"{role}: {text}"
