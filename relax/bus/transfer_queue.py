"""The public face of the transfer queue.

    admit -> (generate) -> put_group -> claim/write/ack by advantages, reference, ... -> claim/ack by the actor -> freed
      ^                                                                                           |
      +-------- a place in a batch: `batch it will fall in - engine version <= max_staleness` <---+

A *ticket* is the right to generate one group; its `issue` number is the group's id and is never reused. It names a prompt by
its number in the order of the data. A prompt whose group was dropped is issued again, under a new issue number. The same face
is served in process (`bus/core.py`) and over ZeroMQ with a shared-memory arena (`bus/client.py`, `bus/server.py`).

Steps and versions: step `b` consumes `prompts_per_step` groups by `U = updates_per_step` optimizer updates, which make
versions `b U + 1` to `(b + 1) U` of the policy. A sample of oldest version `v` has age `(b + 1) U - 1 - v` in its last update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from relax.data.media.cost import RowCosts
from relax.types import Column, WeightManifest


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to generate group `issue` of prompt `prompt`, given when the slowest engine held `version`.

    `batch`: the step it will fall in.
    """

    issue: int
    version: int
    batch: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows handed to one consumer of `task`: N rows, whole groups, in row-id order. `columns[name]` holds N entries.

    The rows come back to the queue when the lease is released, when its consumer dies, or after `deadline_s` seconds.
    `shared[group id]`: the arrays of that group as a whole, read-only, if the claim asked for them; groups without any are left
    out.
    """

    lease_id: str
    task: str
    row_ids: tuple[int, ...]
    group_ids: tuple[int, ...]
    columns: Mapping[str, Column]
    deadline_s: float
    shared: Mapping[int, Mapping[str, NDArray[Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What the core needs to know of the run: batch shape, staleness bound, number of steps, memory.

    `final_tasks`: a row is freed once each of these tasks has acknowledged it.
    `on_stale`: what happens to a group that would be too old. "wait": no step leaves it behind, the step waits for it. "drop":
    steps take what is ready; a group too old for the next step is dropped and its prompt issued again. "mask": as "drop", but
    a group stays as long as the newest of its trained tokens is young enough; its consumer masks the older ones.
    `num_extra`: groups that are begun beyond the places of the bound, so that filtered ones need not be waited for. Those too
    many are kept for the next step if the bound allows it, else dropped and their prompts issued again. Needs `in_order`.
    `in_order`: claims with a step get groups strictly in the order of their issue numbers.
    `row_costs`: what a row of a group's shared arrays costs in training, in tokens; ranks get shards of about equal cost.
    """

    prompts_per_step: int
    max_staleness: int
    num_steps: int
    max_bytes: int = 1 << 30
    lease_s: float = 600.0
    final_tasks: tuple[str, ...] = ("actor",)
    updates_per_step: int = 1
    on_stale: str = "wait"
    num_extra: int = 0
    in_order: bool = False
    row_costs: RowCosts = field(default_factory=dict)


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
    async def put_group(
        self, issue: int, columns: Mapping[str, Column], wait_s: float, shared: Mapping[str, NDArray[Any]] | None = None
    ) -> list[int]:
        """Adds the rows of one group at once (every column has the same number of rows); returns their ids.

        Needs the columns `versions` (oldest version of each row's trained tokens, int64 [N]) and `tokens`; with `on_stale` =
        "mask" also `newest_versions`. Waits while the queue is full. Putting the same issue again returns the ids of the first
        time. A group that is too old on arrival is taken and dropped at once. Raises `StaleHandle` when the ticket is no
        longer good: settled, or lost in a `rewind`.

        `shared`: arrays that belong to the group, not to a row, such as the features of its prompt's images: of any shape,
        stored once however many rows there are, and freed with the last of them.
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
        at_least: int = 1,
        step: int | None = None,
        consumer: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        shared: bool = False,
    ) -> Lease:
        """Between `at_least` and `num_groups` whole groups whose rows all have `columns` and that `task` has not had.

        The oldest come first. `shared`: the lease brings the groups' shared arrays as well.

        With `step` (the trainer's), the groups that would be too old one step later have precedence: others are given only
        while places for them stay free, and never more than `prompts_per_step` groups a step in all. `at_least` may not be more
        than the places that are left.
        """
        ...

    async def renew(self, lease_ids: Sequence[str]) -> None:
        """Their consumer is still at work: the deadlines are a whole lease away again. Leases that ended are left out."""
        ...

    async def ack(self, lease_ids: Sequence[str], *, step: int | None = None) -> None:
        """Settles leases at their consumer's commit. With `step`: optimizer step `step` is done, all at once."""
        ...

    async def release(self, lease_id: str) -> None:
        """Gives a lease's rows back, as if they had not been claimed."""
        ...

    async def drop(self, row_ids: Sequence[int], reason: str, *, reissue: bool = False) -> None:
        """Removes rows for good; counted, and written to the ledger. `reissue`: prompts left without a row are issued again."""
        ...

    async def rewind(self, step: int) -> None:
        """The trainer goes back to the state before step `step`, the first that it will train now.

        Every group that was trained since, is queued or is being generated is dropped, and its prompt issued again, in the
        order of the data. All leases and tickets end, and every receiver of weights holds none until it has taken the version
        that is announced next, which may be lower than before.
        """
        ...

    # -- policy versions ----------------------------------------------------------------------------------------------
    async def subscribe(self, subscriber: str, *, takes_turns: bool = False) -> None:
        """Names a receiver of weights. Until it has acknowledged a version it holds none, and nothing is admitted.

        `takes_turns`: it shares its devices with the trainer, and gives its weights up when they are recalled.
        """
        ...

    async def unsubscribe(self, subscriber: str) -> None: ...

    async def announce(self, manifest: WeightManifest) -> None:
        """Publishes a version to all subscribers."""
        ...

    async def next_manifest(self, subscriber: str, wait_s: float) -> WeightManifest | None:
        """The newest announced version, once it is not the one that the subscriber has acknowledged.

        `None`: the weights are recalled; give them up and say so with `gave_up`.
        """
        ...

    async def recall(self, wait_s: float) -> None:
        """Takes the devices for the trainer: returns once nobody holds the engines and every receiver that takes turns has
        given its weights up. They come back with the next announcement. A second call, after a `WaitTimeout`, waits on."""
        ...

    async def gave_up(self, subscriber: str) -> None:
        """The subscriber has let its weights go, and generates no more until it has taken the next version."""
        ...

    async def hold_engines(self, holder: str, wait_s: float) -> None:
        """Keeps a `recall` waiting until `let_go`, so that work of many requests ends under one version. Ends with the client.
        Waits while the weights are recalled."""
        ...

    async def let_go(self, holder: str) -> None: ...

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
