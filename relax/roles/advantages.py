"""The advantages role.

consumes: whole groups with rewards          waits for: rollout
produces: the column `advantages`            unblocks:  actor
"""

import numpy as np

from relax.algorithms.table import advantages
from relax.bus.transfer_queue import Lease
from relax.roles.role import Role
from relax.types import Ragged

_MAX_GROUPS = 256  # groups of one claim; they are cheap


class Advantages(Role):
    """Takes whatever groups are ready, many at a time, and writes one advantage for each trained token."""

    async def run(self) -> None:
        while True:
            self.activity = "waiting for rewarded groups"
            lease = await self.claim(("reward", "loss_mask"), num_groups=_MAX_GROUPS)
            self.activity = f"computing {len(lease.row_ids)} rows"
            await self._compute(lease)

    async def _compute(self, lease: Lease) -> None:
        mask, reward = lease.columns["loss_mask"], lease.columns["reward"]
        assert isinstance(mask, Ragged)
        column = advantages(
            self.config.algorithm,
            rewards=np.asarray(reward, np.float64),
            group_ids=np.asarray(lease.group_ids, np.int64),
            loss_mask=mask,
        )
        await self.bus.write(lease.row_ids, {"advantages": column})
        await self.bus.ack([lease.lease_id])
