"""Columns that are computed between rollout and actor, by a role of its own or inside the actor.

role:      consumes rows with `needs`     waits for: rollout      produces: `column`     unblocks: actor
in actor:  the same maker is called on the rows that the actor has claimed
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax.bus.transfer_queue import Lease, TransferQueue
from relax.config.run import RunConfig
from relax.errors import StaleHandle
from relax.roles.role import Role
from relax.train.backend import NO_FEATURES, GroupFeatures, StepSums, TrainBatch
from relax.types import Column, WeightManifest
from relax.weights.follower import follow


class ColumnMaker:
    """Computes columns from others; its methods are blocking.

    `max_groups`: the most that a role of its own takes at once. `follows_policy`: `adopt` wants to see publications.
    `version`: of the policy that it computes with, if any. `reads_media`: `make` wants the features of the prompts' media.
    """

    columns: tuple[str, ...]
    needs: tuple[str, ...]
    max_groups: int
    follows_policy = False
    reads_media = False
    version: int | None = None

    def load(self) -> None:
        """Takes what is heavy; called once, before anything else."""

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        """The columns of rows with `needs`, by name; `group_ids [N]`, `features` by group id."""
        raise AssertionError(f"{type(self).__name__} makes no column")

    def adopt(self, manifest: WeightManifest) -> float:
        """Takes a published version, or leaves it; returns the canary's difference. Never called during `make`."""
        raise AssertionError(f"{type(self).__name__} has no weights")

    def resumed(self, version: int) -> None:
        """Inside the actor: its back end has loaded the checkpoint of `version`."""

    def published(self, version: int) -> None:
        """Inside the actor: the weights of its back end are published as `version`."""

    def learn(self, batch: TrainBatch) -> StepSums:
        """Inside the actor: rows of the step with every column, as often as the policy is trained on them."""
        return StepSums()

    def finish_step(self) -> dict[str, float]:
        """Metrics: inside the actor at the end of an update, in a role of its own after each `make`."""
        return {}

    def stop(self) -> None:
        """Ends what `make` waits for, if it waits; from another thread."""

    def save(self, checkpoint: Path) -> None:
        """Inside the actor: puts what it has learned into a folder of its own in `checkpoint`, between two updates."""

    def load_saved(self, checkpoint: Path) -> None:
        """Inside the actor: goes on where `save` was called, before `resumed`."""


class ColumnRole(Role):
    """A role that fills columns, with weights that follow the published ones if its maker wants them."""

    def __init__(self, name: str, config: RunConfig, bus: TransferQueue, maker: ColumnMaker) -> None:
        super().__init__(name, config, bus)
        self.maker = maker
        self._lock = asyncio.Lock()  # weights never change in the middle of a computation

    async def start(self) -> None:
        await asyncio.to_thread(self.maker.load)

    async def stop(self) -> None:
        self.maker.stop()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve())
            if self.maker.follows_policy:
                tasks.create_task(follow(self.bus, self.name, self._adopt))

    async def _adopt(self, manifest: WeightManifest) -> float:
        async with self._lock:
            return await asyncio.to_thread(self.maker.adopt, manifest)

    async def _serve(self) -> None:
        while True:
            self.activity = "waiting for rows"
            lease = await self.claim(self.maker.needs, num_groups=self.maker.max_groups, shared=self.maker.reads_media)
            self.activity = f"computing {len(lease.row_ids)} rows"
            try:
                await self._compute(lease)
            except StaleHandle:
                self.forget(lease)  # the trainer went back: these rows are of a future that is lost

    async def _compute(self, lease: Lease) -> None:
        async with self._lock:
            made = await asyncio.to_thread(self.maker.make, lease.columns, np.asarray(lease.group_ids, np.int64), lease.shared)
        await self.bus.write(lease.row_ids, made)
        await self.settle([lease])
        if metrics := self.maker.finish_step():
            await self.bus.emit({"kind": "metrics", "role": self.name, "metrics": metrics})

    def status(self) -> dict[str, Any]:
        return super().status() | ({} if self.maker.version is None else {"version": self.maker.version})
