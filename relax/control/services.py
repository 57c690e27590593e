"""The roles that rewards ask, in this process, for verbs that score responses without a run."""

from pathlib import Path

from relax.bus.transfer_queue import TransferQueue
from relax.config.run import RunConfig
from relax.control.pages import Pages
from relax.engines.pool import EnginePool
from relax.roles.build import make_engine, make_role
from relax.roles.engine_host import EngineHost
from relax.roles.role import Reply, RoleTask
from relax.roles.topology import POLICY, answering_roles, engine_pools


class Services:
    """Roles that answer requests and the engines that they generate with, from `start` to `stop`."""

    def __init__(self, config: RunConfig, bus: TransferQueue) -> None:
        self._config, self._bus = config, bus
        self._tasks: dict[str, RoleTask] = {}
        self._pages = Pages(self._answer, with_media=config.has_media)

    async def start(self) -> dict[str, str]:
        """Where the roles are, by name: none where no reward asks any."""
        names = answering_roles(self._config)
        if not names:
            return {}
        pools: dict[str, EnginePool] = {}
        for pool, engines in engine_pools(self._config).items():
            pools[pool] = EnginePool({})
            for engine in engines if pool != POLICY else ():
                host = EngineHost(engine, self._config, self._bus, make_engine)
                await self._run(engine, RoleTask(host))
                pools[pool].add(engine, host.engine)
        for name in names:
            await self._run(name, RoleTask(make_role(name, self._config, self._bus, Path(), None, pools)))
        url = await self._pages.start(self._config.services.http_port)
        return {name: f"{url}/{name}" for name in names}

    async def _run(self, name: str, task: RoleTask) -> None:
        self._tasks[name] = task
        await task.start()
        task.run()

    async def stop(self) -> None:
        await self._pages.stop()
        for task in reversed(list(self._tasks.values())):
            await task.stop()

    async def _answer(self, name: str, method: str, page: str, body: bytes) -> Reply:
        task = self._tasks.get(name)
        return await task.answer(method, page, body) if task is not None else (404, {"error": f"no role is called {name!r}"})
