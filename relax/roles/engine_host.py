"""One generation engine and the task that keeps its weights at the newest published version."""

import asyncio
from typing import Any

from relax.bus.transfer_queue import TransferQueue
from relax.config.run import RunConfig
from relax.engines.engine import Engine
from relax.roles.role import MakeEngine, Role
from relax.weights.follower import follow


class EngineHost(Role):
    """Owns an engine. It is routed to only by those who hold it; its weights come from the transfer queue's announcements."""

    def __init__(self, name: str, config: RunConfig, bus: TransferQueue, make_engine: MakeEngine) -> None:
        super().__init__(name, config, bus)
        self._make_engine = make_engine
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, f"{self.name} is not started"
        return self._engine

    async def start(self) -> None:
        self._engine = await asyncio.to_thread(self._make_engine, self.config, self.name)

    async def run(self) -> None:
        self.activity = "generating"
        await follow(self.bus, self.name, self.engine.load_weights)

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    def status(self) -> dict[str, Any]:
        return super().status() | {"kind": "engine"}
