"""One engine, and the task that keeps its weights at the newest published version; a judge's has those of a folder."""

import asyncio
from typing import Any

from relax.bus.transfer_queue import TransferQueue
from relax.config.run import RunConfig
from relax.engines.engine import Engine
from relax.errors import EngineError
from relax.roles.disturbance import Disturbance
from relax.roles.role import MakeEngine, Role
from relax.roles.topology import judge_of, takes_turns
from relax.train.folder_weights import load_folder
from relax.types import WeightManifest
from relax.weights.follower import follow

_LOOK_S = 0.02


class EngineHost(Role):
    """Owns an engine. It is routed to only by those who hold it; its weights come from the transfer queue's announcements.

    Where it takes turns with the trainer, it lets its weights go once what it has in hand is done. An engine of a judge has its
    weights from the start, and keeps them.
    """

    def __init__(
        self, name: str, config: RunConfig, bus: TransferQueue, make_engine: MakeEngine, disturbance: Disturbance | None = None
    ) -> None:
        super().__init__(name, config, bus)
        self._make_engine = make_engine
        self._disturbance = disturbance or Disturbance()
        self._engine: Engine | None = None
        judge = judge_of(config, name)
        self._folder = judge.model if judge is not None else None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, f"{self.name} is not started"
        return self._engine

    async def start(self) -> None:
        self._engine = await asyncio.to_thread(self._make_engine, self.config, self.name)
        if self._folder is not None:
            await load_folder(self._engine, self._folder)

    async def run(self) -> None:
        if self._folder is not None:
            self.activity = f"generating with the weights in {self._folder.path}"
            await asyncio.Event().wait()  # until it is stopped
        self.activity = "waiting for weights"
        await follow(self.bus, self.name, self._load, give_up=self._sleep if takes_turns(self.config) else None)

    async def stop(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def _load(self, manifest: WeightManifest) -> float:
        self._disturbance.check_sync()
        difference = await self.engine.load_weights(manifest)
        self.activity = f"generating with version {manifest.version}"
        self.progress += 1
        return difference

    async def _sleep(self) -> None:
        """The trainer wants the devices: nothing new comes in, so what is in hand ends by itself."""
        self.activity = "ending what it has in hand, for the trainer's turn"
        while True:
            if await self._is_busy():
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                await self.engine.sleep()
                break
            except EngineError:  # a request came in between
                if not await self._is_busy():
                    raise
        self.activity = "asleep while the actor trains"
        self.progress += 1

    async def _is_busy(self) -> bool:
        stats = await self.engine.stats()
        return stats.num_running + stats.num_waiting > 0

    def status(self) -> dict[str, Any]:
        return super().status() | {"kind": "engine"}
