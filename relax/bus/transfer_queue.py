"""The public face of the transfer queue.

    admit -> (generate) -> put_group -> claim/write/ack by advantages, reference, ... -> claim/ack by the actor -> freed
      ^                                                                                           |
      +-------- a place in a batch: `batch it will fall in - engine version <= max_staleness` <---+

A *ticket* is the right to generate one group; its `issue` number is the group's id, is never reused, and fixes the prompt
(the data set is a pure function of it). The same face is served in process (`bus/core.py`) and over ZeroMQ with a
shared-memory arena (`bus/client.py`, `bus/server.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax.types import Column, WeightManifest


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to generate group `issue`, given when the slowest engine held `version`; `batch`: the step it will fall in."""

    issue: int
    version: int
    batch: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows handed to one consumer of `task`: N rows, whole groups, in row-id order. `columns[name]` holds N entries.

    The rows come back to the queue when the lease is released, when its consumer dies, or after `deadline_s` seconds.
    """

    lease_id: str
    task: str
    row_ids: tuple[int, ...]
    group_ids: tuple[int, ...]
    columns: Mapping[str, Column]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What the core needs to know of the run: batch shape, staleness bound, number of steps, memory.

    `final_tasks`: a row is freed once each of these tasks has acknowledged it.
    """

    prompts_per_step: int
    max_staleness: int
    num_steps: int
    max_bytes: int = 1 << 30
    lease_s: float = 600.0
    final_tasks: tuple[str, ...] = ("actor",)


class TransferQueue(Protocol):
    """Every call that waits has `wait_s` and raises `WaitTimeout` with the reason; a lost core raises `BusGone`."""

    # -- admission ----------------------------------------------------------------------------------------------------
    async def admit(self, count: int, wait_s: float) -> list[Ticket]:
        """Between 1 and `count` tickets, as soon as one may start. After the last batch's last place: an empty list."""
        ...

    async def forfeit(self, issue: int, outcome: str, reason: str) -> None:
        """Ends a ticket without rows (`outcome`: "filtered", "failed"); its place in the batch is given to another."""
        ...

    # -- rows ---------------------------------------------------------------------------------------------------------
    async def put_group(self, issue: int, columns: Mapping[str, Column], wait_s: float) -> list[int]:
        """Adds the rows of one group at once (every column has the same number of rows); returns their ids.

        Needs the columns `versions` (oldest version of each row's trained tokens, int64 [N]) and `tokens`. Waits while the
        queue is full. Putting the same issue again returns the ids of the first time.
        """
        ...

    async def write(self, row_ids: Sequence[int], columns: Mapping[str, Column]) -> None:
        """Adds columns to rows. A column is written once: the same bytes again are ignored, other bytes are refused."""
        ...

    async def claim(
        self,
        task: str,
        columns: Sequence[str],
        *,
        num_groups: int,
        wait_s: float,
        step: int | None = None,
        consumer: str = "",
        rank: int = 0,
        num_ranks: int = 1,
    ) -> Lease:
        """Between 1 and `num_groups` whole groups whose rows all have `columns` and that `task` has not had, oldest first.

        With `step` (the trainer's), the groups that would be too old one step later have precedence: others are given only
        while places for them stay free, and never more than `prompts_per_step` groups a step in all.
        """
        ...

    async def ack(self, lease_ids: Sequence[str], *, step: int | None = None) -> None:
        """Settles leases at their consumer's commit. With `step`: optimizer step `step` is done, all at once."""
        ...

    async def release(self, lease_id: str) -> None:
        """Gives a lease's rows back, as if they had not been claimed."""
        ...

    async def drop(self, row_ids: Sequence[int], reason: str) -> None:
        """Removes rows for good; counted, and written to the ledger."""
        ...

    # -- policy versions ----------------------------------------------------------------------------------------------
    async def subscribe(self, subscriber: str) -> None:
        """Names a receiver of weights. Until it has acknowledged a version it holds none, and nothing is admitted."""
        ...

    async def unsubscribe(self, subscriber: str) -> None: ...

    async def announce(self, manifest: WeightManifest) -> None:
        """Publishes a version to all subscribers."""
        ...

    async def next_manifest(self, subscriber: str, after: int, wait_s: float) -> WeightManifest:
        """The newest announced version above `after`."""
        ...

    async def acknowledge(self, subscriber: str, version: int) -> None:
        """The subscriber computes with `version`, proven by digest and canary."""
        ...

    async def reject(self, subscriber: str, version: int, reason: str) -> None:
        """The subscriber could not take `version`: counted, and offered to it again."""
        ...

    async def wait_acknowledged(self, version: int, wait_s: float) -> None:
        """Returns when every subscriber holds `version` or a newer one."""
        ...

    # -- observation --------------------------------------------------------------------------------------------------
    async def emit(self, event: Mapping[str, Any]) -> None:
        """Appends an event (JSON values, with a "kind") to the stream that the controller reads."""
        ...

    async def events(self, after: int, wait_s: float) -> list[dict[str, Any]]:
        """Events with a sequence number ("seq") above `after`; an empty list when none came in `wait_s`."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Depth, bytes, ages, tickets, versions by subscriber, waits with their reasons, ledger counts."""
        ...

    # -- life ---------------------------------------------------------------------------------------------------------
    async def snapshot(self, path: str) -> None:
        """Writes the state to a file, atomically: rows, tickets, counts. Leased rows are in it as un-consumed."""
        ...

    async def close(self) -> None:
        """Ends this client (or, in process, the core); its leases return."""
        ...
