"""The in-process runtime: the same roles as tasks of one event loop, without Ray. For tests, debugging and notebooks."""

import asyncio
from pathlib import Path
from typing import Any

from relax.bus.core import Core
from relax.bus.transfer_queue import TransferQueue
from relax.config.run import RunConfig
from relax.engines.pool import EnginePool
from relax.errors import RoleError
from relax.roles.build import make_backend, make_core, make_engine, make_role
from relax.roles.engine_host import EngineHost
from relax.roles.role import MakeBackend, MakeEngine, RoleTask
from relax.roles.topology import engine_names, role_specs


class InProcessRuntime:
    """Runs everything here; heavy work happens in threads, so the event loop stays free."""

    def __init__(
        self, config: RunConfig, make_backend: MakeBackend = make_backend, make_engine: MakeEngine = make_engine
    ) -> None:
        self.config = config
        self._make_backend, self._make_engine = make_backend, make_engine
        self._core: Core | None = None
        self._tasks: dict[str, RoleTask] = {}

    @property
    def bus(self) -> TransferQueue:
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
        core = self._core = make_core(self.config, run_dir, resume)
        hosts = [EngineHost(name, self.config, core, self._make_engine) for name in engine_names(self.config)]
        self._tasks = {host.name: RoleTask(host) for host in hosts}
        for task in self._tasks.values():
            await task.start()  # one after another: transformers' lazy modules cannot be imported by two threads at once
        engines = EnginePool({host.name: host.engine for host in hosts})
        for spec in role_specs(self.config):
            role = make_role(spec.name, self.config, core, run_dir, resume, engines, self._make_backend)
            self._tasks[spec.name] = RoleTask(role)
            await self._tasks[spec.name].start()
        for task in self._tasks.values():
            task.run()

    async def status(self) -> dict[str, dict[str, Any]]:
        return {name: task.status() for name, task in self._tasks.items()}

    async def stop(self) -> None:
        for task in reversed(list(self._tasks.values())):
            await task.stop()
        self._tasks = {}
        if self._core is not None:
            await self._core.close()
