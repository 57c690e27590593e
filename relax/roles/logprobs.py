"""The reference and actor_fwd roles: log-probs of a policy that is not the one in training.

    consumes: rows with tokens                              waits for: rollout
    produces: `ref_logprobs` or `old_logprobs`              unblocks:  actor

The reference keeps the weights that the run began with. actor_fwd follows the published ones.
"""

import asyncio

import numpy as np

from relax.bus.transfer_queue import Lease, TransferQueue
from relax.config.run import RunConfig
from relax.roles.role import MakeBackend, Role
from relax.train.backend import TrainBackend, TrainBatch
from relax.types import Ragged, WeightManifest
from relax.weights.follower import follow

_MAX_GROUPS = 32


class LogprobRole(Role):
    """Fills `column` with the log-probs of its back end's weights."""

    def __init__(
        self, name: str, column: str, config: RunConfig, bus: TransferQueue, make_backend: MakeBackend, *, follows_policy: bool
    ) -> None:
        super().__init__(name, config, bus)
        self.column, self.follows_policy, self._make_backend = column, follows_policy, make_backend
        self._backend: TrainBackend | None = None
        self._lock = asyncio.Lock()  # weights never change in the middle of a forward

    async def start(self) -> None:
        self._backend = await asyncio.to_thread(self._make_backend, self.config)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve())
            if self.follows_policy:
                tasks.create_task(follow(self.bus, self.name, self._load))

    async def _load(self, manifest: WeightManifest) -> float:
        assert self._backend is not None
        async with self._lock:
            return await asyncio.to_thread(self._backend.load_weights, manifest)

    async def _serve(self) -> None:
        while True:
            self.activity = "waiting for rows"
            lease = await self.claim(("tokens", "loss_mask"), num_groups=_MAX_GROUPS)
            self.activity = f"computing {len(lease.row_ids)} rows"
            await self._compute(lease)

    async def _compute(self, lease: Lease) -> None:
        assert self._backend is not None
        tokens, mask = lease.columns["tokens"], lease.columns["loss_mask"]
        assert isinstance(tokens, Ragged)
        assert isinstance(mask, Ragged)
        batch = TrainBatch(tokens, mask, np.asarray(lease.group_ids, np.int64))
        async with self._lock:
            values = await asyncio.to_thread(self._backend.logprobs, batch)
        await self.bus.write(lease.row_ids, {self.column: values})
        await self.bus.ack([lease.lease_id])
