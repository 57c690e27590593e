"""What a consumer asks for, and what the queue knows of each task."""

from collections import deque
from dataclasses import dataclass, field

from relax.bus.groups import Group
from relax.bus.leases import Held
from relax.bus.order import IssueOrder
from relax.bus.sampler import ReadyIndex
from relax.bus.staleness import Places
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError


@dataclass(frozen=True, slots=True)
class Claim:
    """The arguments of `TransferQueue.claim`."""

    task: str
    columns: frozenset[str]
    num_groups: int
    step: int | None
    consumer: str
    rank: int
    num_ranks: int
    at_least: int = 1

    def check(self, limits: QueueLimits) -> None:
        if self.num_groups < 1:
            raise BusError(f"claim of {self.task}: num_groups = {self.num_groups} must be at least 1")
        if not 1 <= self.at_least <= self.num_groups:
            raise BusError(f"claim of {self.task}: at_least = {self.at_least} must be from 1 to num_groups = {self.num_groups}")
        if not 0 <= self.rank < self.num_ranks:
            raise BusError(f"claim of {self.task}: rank {self.rank} is not among {self.num_ranks} ranks")
        if self.step is not None and not 0 <= self.step < limits.num_steps:
            raise BusError(f"claim of {self.task}: step {self.step} is outside the run's {limits.num_steps} steps")

    def fewest(self, left: int | None) -> int:
        """How few groups are worth a plan for all ranks, when the step has `left` places (`None`: there is no step)."""
        if left is None:
            return self.at_least * self.num_ranks if self.at_least > 1 else 1
        if self.at_least > left:
            raise BusError(f"claim of {self.task}: at_least = {self.at_least}, but step {self.step} has {left} places left")
        return min(self.at_least * self.num_ranks, left)

    @property
    def plan_key(self) -> "Claim":
        """What the claims of all ranks that share a plan have in common."""
        return Claim(self.task, self.columns, 0, self.step, "", 0, self.num_ranks)


@dataclass(slots=True)
class Task:
    """One consumer's view. `held`: groups under a lease of this task; `planned`: shards that their ranks have not fetched.

    `places` once it has claimed by step; `order` as well, if its steps take the groups in order.
    """

    name: str
    indexes: dict[frozenset[str], ReadyIndex] = field(default_factory=dict)
    places: Places | None = None
    order: IssueOrder | None = None
    held: dict[int, Held] = field(default_factory=dict)
    planned: dict[Claim, list[deque[Held]]] = field(default_factory=dict)

    def update(self, group: Group) -> bool:
        """The group came, came back or got a column."""
        if not self.is_open(group):
            return False
        return sum(index.update(group) for index in self.indexes.values()) > 0

    def is_open(self, group: Group) -> bool:
        """Whether the task has neither had the group nor holds it."""
        return group.issue not in self.held and self.name not in group.done

    def discard(self, group: Group) -> None:
        for index in self.indexes.values():
            index.discard(group.issue)

    def forget_plan(self, held: Held) -> None:
        """A shard that its rank has not fetched is not to be had any more."""
        for key, queues in list(self.planned.items()):
            for queue in queues:
                if held in queue:
                    queue.remove(held)
            if not any(queues):
                del self.planned[key]
