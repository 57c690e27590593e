"""The in-process runtime: the same roles as tasks of one event loop, without Ray. For tests, debugging and notebooks."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from relax.bus.core import Core
from relax.bus.transfer_queue import TransferQueue
from relax.config.faults import FaultEvent
from relax.config.run import RunConfig
from relax.control.pages import Pages
from relax.control.runtime import QUEUE
from relax.engines.pool import EnginePool
from relax.errors import BusError, RoleError
from relax.roles.build import make_backend, make_core, make_engine, make_role
from relax.roles.disturbance import Disturbance, slowed
from relax.roles.engine_host import EngineHost
from relax.roles.role import MakeBackend, MakeEngine, Reply, Role, RoleTask
from relax.roles.topology import answering_roles, engine_pools, role_specs

_LOOK_S = 0.01


class InProcessRuntime:
    """Runs everything here; heavy work happens in threads, so the event loop stays free.

    Nothing here is a process that could be killed: `end` cancels the tasks of a role, whose threads end by themselves.
    """

    def __init__(
        self, config: RunConfig, make_backend: MakeBackend = make_backend, make_engine: MakeEngine = make_engine
    ) -> None:
        self.config = config
        self._make_backend, self._make_engine = make_backend, make_engine
        self._core: Core | None = None
        self._pools: dict[str, EnginePool] = {}
        self._tasks: dict[str, RoleTask] = {}
        self._ended: dict[str, asyncio.Task[None]] = {}  # roles that were ended, and the end of their work
        self._disturbances: dict[str, Disturbance] = {}
        self._run_dir = Path()
        self._pages = Pages(self._answer, with_media=config.has_media)
        self._services: dict[str, str] = {}

    @property
    def bus(self) -> TransferQueue:
        return self._queue

    @property
    def _queue(self) -> Core:
        assert self._core is not None, "the runtime is not started"
        return self._core

    async def start(self, run_dir: Path, resume: Path | None) -> None:
        limit = self.config.services.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._start(run_dir, resume)
        except TimeoutError:
            raise RoleError(f"the roles did not start within services.start_timeout_s = {limit:g} s") from None

    async def _start(self, run_dir: Path, resume: Path | None) -> None:
        self._run_dir = run_dir
        self._core = make_core(self.config, run_dir, resume)
        self._ended.clear()
        self._pools = {pool: EnginePool({}) for pool in engine_pools(self.config)}
        for pool, names in engine_pools(self.config).items():
            for name in names:  # one after another: two threads cannot import transformers' lazy modules at once
                self._pools[pool].add(name, await self._new_engine(name))
        if answering := answering_roles(self.config):
            url = await self._pages.start(self.config.services.http_port)
            self._services = {name: f"{url}/{name}" for name in answering}
        for spec in role_specs(self.config):
            await self._new_role(spec.name, resume)
        for task in self._tasks.values():
            task.run()

    async def status(self) -> dict[str, dict[str, Any]]:
        if self._core is not None and self._core.waits.closed is not None:
            return {QUEUE: {"role": QUEUE, "error": self._core.waits.closed, "error_kind": "queue"}}
        return {name: self._status(name) for name in self._tasks}

    def _status(self, name: str) -> dict[str, Any]:
        if name in self._ended:
            return {"role": name, "error": f"{name} was ended", "error_kind": "dead"}
        return self._tasks[name].status()

    async def restart(self, name: str, resume: Path | None, first_step: int, *, is_restart: bool) -> None:
        await self._let_go(name)
        pool = next((pool for pool in self._pools.values() if name in pool.names), None)
        if pool is not None:
            pool.replace(name, await self._new_engine(name))
        else:
            await self._new_role(name, resume, first_step, is_restart=is_restart)
        self._ended.pop(name, None)
        self._tasks[name].run()

    async def end(self, name: str) -> None:
        if name == QUEUE:
            await self._queue.close()
            return
        task = self._tasks[name]
        while True:  # a thread that writes a checkpoint cannot be killed, as a process would be
            if not str(task.status().get("activity", "")).startswith("saving"):
                break
            await asyncio.sleep(_LOOK_S)
        if name not in self._ended:
            self._ended[name] = asyncio.create_task(task.stop())
        await asyncio.shield(self._ended[name])  # whoever asks: nothing of it may write any more

    async def disturb(self, name: str, event: FaultEvent) -> None:
        self._disturbances[name].add(event)

    async def stop(self) -> None:
        for task in reversed(list(self._tasks.values())):
            await task.stop()
        self._tasks = {}
        await self._pages.stop()
        for pool in self._pools.values():
            await pool.close()  # the engines once more, and with them what watches over them
        if self._core is not None:
            await self._core.close()

    async def _new_engine(self, name: str) -> Any:
        bus, disturbance = self._connect(name)
        host = EngineHost(name, self.config, bus, self._make_engine, disturbance)
        self._tasks[name] = RoleTask(host)
        await self._tasks[name].start()
        return host.engine

    async def _new_role(
        self, name: str, resume: Path | None, first_step: int | None = None, *, is_restart: bool = False
    ) -> Role:
        bus, _ = self._connect(name)
        role = make_role(
            name,
            self.config,
            bus,
            self._run_dir,
            resume,
            self._pools,
            self._make_backend,
            first_step=first_step,
            is_restart=is_restart,
            services=self._services,
        )
        self._tasks[name] = RoleTask(role)
        await self._tasks[name].start()
        return role

    async def _answer(self, name: str, method: str, page: str, body: bytes) -> Reply:
        task = self._tasks.get(name)
        if task is None:
            return 404, {"error": f"no role is called {name!r}: there are {', '.join(self._tasks)}"}
        if name in self._ended:
            return 503, {"error": f"{name} is being started"}
        return await task.answer(method, page, body)

    def _connect(self, name: str) -> tuple[TransferQueue, Disturbance]:
        disturbance = self._disturbances[name] = Disturbance(self.config.faults.seed)
        is_slow = any(event.kind == "delay" and event.target == name for event in self.config.faults.events)
        return (slowed(self._queue, disturbance) if is_slow else self._queue), disturbance

    async def _let_go(self, name: str) -> None:
        """Ends a role, and gives back what it held: there is no connection here whose end would do so."""
        task = self._tasks[name]
        leases = task.status().get("leases", [])
        await (asyncio.shield(self._ended[name]) if name in self._ended else task.stop())
        for lease in leases:
            with contextlib.suppress(BusError):  # settled in its last moments
                await self._queue.release(lease)
        if name == "rollout":
            self._queue.give_again(sorted(self._queue.tickets.in_flight))
