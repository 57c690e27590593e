"""Who has which rows: claims, acknowledgements and returns, for every task on its own."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from relax.bus.groups import Group
from relax.bus.leases import Held, LeaseTable
from relax.bus.rows import Rows
from relax.bus.sampler import ReadyIndex, shards
from relax.bus.staleness import Places
from relax.bus.tickets import Tickets
from relax.bus.transfer_queue import QueueLimits, Ticket
from relax.bus.waits import Waits
from relax.errors import BusError


@dataclass(frozen=True, slots=True)
class Claim:
    """What a consumer asks for; the arguments of `TransferQueue.claim`."""

    task: str
    columns: frozenset[str]
    num_groups: int
    step: int | None
    consumer: str
    rank: int
    num_ranks: int

    def check(self, limits: QueueLimits) -> None:
        if self.num_groups < 1:
            raise BusError(f"claim of {self.task}: num_groups = {self.num_groups} must be at least 1")
        if not 0 <= self.rank < self.num_ranks:
            raise BusError(f"claim of {self.task}: rank {self.rank} is not among {self.num_ranks} ranks")
        if self.step is not None and not 0 <= self.step < limits.num_steps:
            raise BusError(f"claim of {self.task}: step {self.step} is outside the run's {limits.num_steps} steps")


@dataclass(slots=True)
class Task:
    """One consumer's view. `held`: groups under a lease of this task; `planned`: shards that their ranks have not fetched."""

    name: str
    indexes: dict[frozenset[str], ReadyIndex] = field(default_factory=dict)
    places: Places | None = None
    held: dict[int, Held] = field(default_factory=dict)
    planned: dict[Claim, list[deque[Held]]] = field(default_factory=dict)

    def update(self, group: Group) -> bool:
        """The group came, came back or got a column."""
        if group.issue in self.held or self.name in group.done:
            return False
        return sum(index.update(group) for index in self.indexes.values()) > 0

    def discard(self, group: Group) -> None:
        for index in self.indexes.values():
            index.discard(group.issue)


class Claims:
    """Hands out groups. Every event about a group passes through here once, so that ready sets never need a scan."""

    def __init__(self, limits: QueueLimits, rows: Rows, tickets: Tickets, leases: LeaseTable, waits: Waits) -> None:
        self._limits, self._rows, self._tickets, self._leases, self._waits = limits, rows, tickets, leases, waits
        self.tasks: dict[str, Task] = {}
        self.ages: Counter[int] = Counter()  # of trained groups
        self.num_violations = 0

    # -- events -------------------------------------------------------------------------------------------------------
    def admitted(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            for places in self._all_places():
                places.add(ticket.version)

    def withdrawn(self, ticket: Ticket) -> None:
        """A ticket was forfeited or taken back."""
        for places in self._all_places():
            places.remove(ticket.version)
        self._notify_all()

    def arrived(self, group: Group, ticket: Ticket) -> None:
        for places in self._all_places():
            places.remove(ticket.version)
            places.add(group.version)
        self.completed([group])

    def completed(self, groups: Sequence[Group]) -> None:
        """Groups got a column on all their rows."""
        for task in self.tasks.values():
            if sum(task.update(group) for group in groups) > 0:
                self._notify(task)

    def removed(self, group: Group) -> None:
        """The group leaves the queue, trained or dropped."""
        for task in self.tasks.values():
            held = task.held.pop(group.issue, None)
            task.discard(group)
            if held is not None:
                self._leases.take_from(held, group)
            if task.places is not None and self.is_counted(task, group, held):
                if held is not None and held.step is not None:
                    task.places.give_back(held.step, None)
                elif held is None:
                    task.places.remove(group.version)
        self._notify_all()

    def is_leased(self, issue: int) -> bool:
        """Whether somebody has a lease that was given with this issue in it."""
        return self._leases.has_lost(issue) or any(issue in task.held for task in self.tasks.values())

    @staticmethod
    def is_counted(task: Task, group: Group, held: Held | None) -> bool:
        return held is not None or task.name not in group.done

    # -- claiming -----------------------------------------------------------------------------------------------------
    def attempt(self, claim: Claim) -> Held | None:
        """A lease, if one can be had now."""
        self.expire()
        task = self.tasks.setdefault(claim.task, Task(claim.task))
        key = Claim(claim.task, claim.columns, 0, claim.step, "", 0, claim.num_ranks)
        queues = task.planned.get(key) or [deque() for _ in range(claim.num_ranks)]
        if not queues[claim.rank]:
            for rank, shard in enumerate(self._plan(task, claim)):
                queues[rank].append(self._reserve(task, claim, shard))
        if not queues[claim.rank]:
            return None
        held = queues[claim.rank].popleft()
        held.delivered, held.consumer = True, claim.consumer
        self._leases.renew(held)
        task.planned[key] = queues
        if not any(queues):
            del task.planned[key]
        else:
            self._notify(task)
        return held

    def _plan(self, task: Task, claim: Claim) -> list[list[Group]]:
        """The shards of all ranks, taken out of the ready sets; an empty list when there is nothing to give yet."""
        index = self.index(task, claim.columns)
        places, step = task.places, claim.step
        if step is not None:
            places = self._open_places(task)
            self._check_step(task, places, step)
        left = places.free(step) if places is not None and step is not None else None

        groups = index.take(claim.num_groups * claim.num_ranks, lambda version: _take_place(places, step, version))
        count = len(groups)
        if left is not None:
            # every rank gets as many groups as the others, unless this is the rest of the step
            if count < min(claim.num_ranks, left):
                count = 0
            elif count < left:
                count -= count % claim.num_ranks
        for group in groups[count:]:
            self._give_back(task, group, step)
        for group in groups[:count]:
            task.discard(group)
        return shards(groups[:count], claim.num_ranks) if count else []

    def _reserve(self, task: Task, claim: Claim, groups: list[Group]) -> Held:
        held = self._leases.open(task.name, claim.step, claim.consumer, groups)
        for group in groups:
            task.held[group.issue] = held
        return held

    def _check_step(self, task: Task, places: Places, step: int) -> None:
        if step < places.next_step:
            raise BusError(f"claim of {task.name}: step {step} is trained already; the next is {places.next_step}")
        if places.free(step) == 0:
            raise BusError(f"claim of {task.name}: all {places.prompts_per_step} groups of step {step} are claimed already")
        old = places.too_old()
        if old is not None:
            self.num_violations += 1
            raise BusError(
                f"claim of {task.name}: a group of version {old} waits, but step {places.next_step} may only consume version "
                f"{places.next_step - self._limits.max_staleness} or newer; this is a fault of the transfer queue"
            )

    def index(self, task: Task, columns: frozenset[str]) -> ReadyIndex:
        if columns not in task.indexes:
            index = task.indexes[columns] = ReadyIndex(columns)
            for group in self.open_groups(task):
                index.update(group)
        return task.indexes[columns]

    def _open_places(self, task: Task, next_step: int = 0) -> Places:
        if task.places is None:
            task.places = Places(self._limits.prompts_per_step, self._limits.max_staleness, next_step)
            for ticket in self._tickets.in_flight.values():
                task.places.add(ticket.version)
            for group in self.open_groups(task):
                task.places.add(group.version)
            self._waits.notify("room")
        return task.places

    def resume(self, name: str, next_step: int) -> None:
        """Sets up a task that claims by step, after a restart: its groups are in the queue already."""
        self._open_places(self.tasks.setdefault(name, Task(name)), next_step)

    # -- settling -----------------------------------------------------------------------------------------------------
    def ack(self, lease_ids: Sequence[str], step: int | None) -> None:
        """Settles leases; with `step`, all of the step's at once. Nothing is settled when anything is refused."""
        leases = [self._leases.get(lease_id) for lease_id in dict.fromkeys(lease_ids)]
        for held in leases:
            if held.step != step:
                claimed = "without a step" if held.step is None else f"for step {held.step}"
                raise BusError(f"lease {held.lease_id} was claimed {claimed}, but is acknowledged with step={step}")
        if step is not None:
            self._check_complete(leases, step)
        for held in leases:
            task = self.tasks[held.task]
            self._leases.end(held, "is acknowledged already")
            for group in held.groups:
                del task.held[group.issue]
                group.done.add(task.name)
        if step is not None:
            task = self.tasks[leases[0].task]
            assert task.places is not None
            task.places.close(step)
            self._notify(task)
        for held in leases:
            for group in list(held.groups):
                if group.done.issuperset(self._limits.final_tasks):
                    self._retire(group, step)
        self._waits.notify("room", "admit")

    def _check_complete(self, leases: Sequence[Held], step: int) -> None:
        if not leases:
            raise BusError(f"step {step} cannot be acknowledged without its leases")
        task = self.tasks[leases[0].task]
        places = task.places
        assert places is not None
        if any(held.task != task.name for held in leases):
            raise BusError(f"step {step}: leases of more than one task: {sorted({held.task for held in leases})}")
        if step != places.next_step:
            raise BusError(f"step {step} cannot be acknowledged: the next step of {task.name} is {places.next_step}")
        count = sum(len(held.groups) for held in leases)
        if count != places.prompts_per_step:
            raise BusError(
                f"step {step} cannot be acknowledged: the leases hold {count} of its {places.prompts_per_step} groups "
                f"({places.taken(step)} are claimed)"
            )

    def _retire(self, group: Group, step: int | None) -> None:
        if step is not None:
            age = step - group.version
            if age > self._limits.max_staleness:
                self.num_violations += 1
            self.ages[age] += 1
        self._tickets.trained(group.issue, step)
        self._rows.remove(group)
        self.removed(group)

    def give_back(self, held: Held, how: str) -> None:
        """The lease ends, and its rows are as if they had not been claimed."""
        task = self.tasks[held.task]
        self._leases.end(held, how)
        if not held.delivered:
            for key, queues in list(task.planned.items()):
                for queue in queues:
                    if held in queue:
                        queue.remove(held)
                if not any(queues):
                    del task.planned[key]
        for group in held.groups:
            group.returned = True
            del task.held[group.issue]
            self._give_back(task, group, held.step)
        self._notify(task)

    def _give_back(self, task: Task, group: Group, step: int | None) -> None:
        if task.places is not None and step is None:
            task.places.add(group.version)
        elif task.places is not None and step is not None:
            task.places.give_back(step, group.version)
        task.update(group)

    def expire(self) -> None:
        """Takes back the leases that are past their deadline."""
        for held in self._leases.expired():
            self.give_back(held, f"ran past its {self._leases.lease_s:g} s and its rows went back to the queue")

    # -- memory -------------------------------------------------------------------------------------------------------
    def is_needed(self, version: int) -> bool:
        """Whether the next step cannot be completed from what is in the queue, and a ticket of `version` would help."""
        for task in self.tasks.values():
            if task.places is not None:
                present = Counter(group.version for group in self.open_groups(task))
                before = task.places.takeable(present)
                if (
                    before < task.places.free(task.places.next_step)
                    and task.places.takeable(present + Counter([version])) > before
                ):
                    return True
        return not self._rows.groups

    # -- inside -------------------------------------------------------------------------------------------------------
    def open_groups(self, task: Task) -> list[Group]:
        """Groups with rows that the task has not had; a scan, for rare events only."""
        groups = self._rows.groups.values()
        return [group for group in groups if group.issue not in task.held and task.name not in group.done]

    def _all_places(self) -> list[Places]:
        return [task.places for task in self.tasks.values() if task.places is not None]

    def _notify(self, task: Task) -> None:
        self._waits.notify(("claim", task.name))

    def _notify_all(self) -> None:
        for task in self.tasks.values():
            self._notify(task)


def _take_place(places: Places | None, step: int | None, version: int) -> bool:
    """Takes a place for a group of `version`, if it may have one."""
    if places is not None and step is None:
        places.remove(version)
    elif places is not None and step is not None:
        if not places.may_take(step, version):
            return False
        places.take(step, version)
    return True
