"""Who has which rows: claims, acknowledgements and returns, for every task on its own."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from relax.bus.claim import Claim, Task
from relax.bus.groups import Group
from relax.bus.leases import Held, LeaseTable
from relax.bus.order import IssueOrder
from relax.bus.rows import Rows
from relax.bus.sampler import ReadyIndex, shards
from relax.bus.staleness import Places, age_at, due_step, leaves_behind
from relax.bus.tickets import Tickets
from relax.bus.transfer_queue import QueueLimits, Ticket
from relax.bus.waits import Waits
from relax.errors import BusError


class Claims:
    """Hands out groups. Every event about a group passes through here once, so that ready sets never need a scan."""

    def __init__(self, limits: QueueLimits, rows: Rows, tickets: Tickets, leases: LeaseTable, waits: Waits) -> None:
        self._limits, self._rows, self._tickets, self._leases, self._waits = limits, rows, tickets, leases, waits
        self.tasks: dict[str, Task] = {}
        self.ages: Counter[int] = Counter()  # of trained groups
        self.num_violations = 0
        self.num_masked = 0  # trained groups with tokens that were too old

    # -- events -------------------------------------------------------------------------------------------------------
    def admitted(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            for task in self.tasks.values():
                if task.places is not None:
                    task.places.add(self._due(ticket))
                if task.order is not None:
                    task.order.push(ticket.issue)

    def withdrawn(self, ticket: Ticket) -> None:
        """A ticket was forfeited or taken back."""
        for places in self._all_places():
            places.remove(self._due(ticket))
        self._notify_all()

    def arrived(self, group: Group, ticket: Ticket) -> None:
        for places in self._all_places():
            places.remove(self._due(ticket))
            places.add(group.due)
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
            if task.places is not None and (held is not None or task.name not in group.done):
                if held is not None and held.step is not None:
                    task.places.give_back(held.step, None)
                elif held is None:
                    task.places.remove(group.due)
        self._notify_all()

    def rewound(self, step: int, how: str) -> None:
        """Every group and ticket is gone, every lease ends, and step `step` is the next one."""
        for held in self._leases.all():
            self._leases.end(held, how)
        for task in self.tasks.values():
            task.held.clear()
            task.planned.clear()
            task.indexes.clear()
            if task.places is not None:
                task.places.rewind(step)
            if task.order is not None:
                task.order.clear()
        self._notify_all()

    def is_leased(self, issue: int) -> bool:
        """Whether somebody has a lease that was given with this issue in it."""
        return self._leases.has_lost(issue) or any(issue in task.held for task in self.tasks.values())

    # -- claiming -----------------------------------------------------------------------------------------------------
    def attempt(self, claim: Claim) -> Held | None:
        """A lease, if one can be had now."""
        self.expire()
        task = self.tasks.setdefault(claim.task, Task(claim.task))
        key = claim.plan_key
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
        index, step, left = self.index(task, claim.columns), claim.step, None
        if step is not None:
            places = self._open_places(task)
            self._check_step(task, places, step)
            left = places.free(step)
        fewest = claim.fewest(left)
        if len(index) < fewest:
            return []
        most = claim.num_groups * claim.num_ranks
        if step is not None and task.order is not None:
            groups = self._take_in_order(task, index, step, most)
        else:
            groups = index.take(most, lambda due: self._take_place(task, step, due))
        count = len(groups)
        if left is not None and count < left:
            # every rank gets as many groups as the others, unless this is the rest of the step
            count -= count % claim.num_ranks
        if count < fewest:
            count = 0
        for group in groups[count:]:
            self._give_back(task, group, step)
        for group in groups[:count]:
            task.discard(group)
        return shards(groups[:count], claim.num_ranks, self._rows.cost) if count else []

    def _take_place(self, task: Task, step: int | None, due: int) -> bool:
        """Takes a place for a group due by step `due`, if it may have one."""
        places = task.places
        if places is not None and step is None:
            places.remove(due)
        elif places is not None and step is not None:
            fits = due >= step and places.free(step) > 0 if leaves_behind(self._limits) else places.may_take(step, due)
            if not fits:
                return False
            places.take(step, due)
        return True

    def _take_in_order(self, task: Task, index: ReadyIndex, step: int, most: int) -> list[Group]:
        """The lowest issues, as long as each is ready; none of them is ever passed over."""
        assert task.places is not None
        assert task.order is not None
        taken: list[Group] = []
        while len(taken) < most and task.places.is_next_free(step):
            issue = task.order.head(lambda issue: self._is_open(task, issue))
            group = index.ready.get(issue) if issue is not None else None
            if group is None or group.due < step:
                break
            task.order.pop()
            index.discard(group.issue)
            task.places.take(step, group.due)
            taken.append(group)
        return taken

    def _is_open(self, task: Task, issue: int) -> bool:
        group = self._rows.groups.get(issue)
        return task.is_open(group) if group is not None else issue in self._tickets.prompts

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
        due = None if leaves_behind(self._limits) else places.too_old()
        if due is not None:
            self.num_violations += 1
            raise BusError(
                f"claim of {task.name}: a group waits that was due by step {due}, and step {places.next_step} is the next; "
                "this is a fault of the transfer queue"
            )

    def index(self, task: Task, columns: frozenset[str]) -> ReadyIndex:
        if columns not in task.indexes:
            index = task.indexes[columns] = ReadyIndex(columns)
            for group in self.open_groups(task):
                index.update(group)
        return task.indexes[columns]

    def _open_places(self, task: Task, next_step: int = 0) -> Places:
        if task.places is None:
            task.places = Places(self._limits.prompts_per_step, next_step)
            groups = self.open_groups(task)
            for ticket in self._tickets.in_flight.values():
                task.places.add(self._due(ticket))
            for group in groups:
                task.places.add(group.due)
            if self._limits.in_order:
                task.order = IssueOrder([*self._tickets.in_flight, *self._tickets.again, *(group.issue for group in groups)])
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
        age = 0
        if step is not None:
            age = age_at(self._limits, group.version, step)
            if age > self._limits.max_staleness and self._limits.on_stale == "mask" and group.due >= step:
                self.num_masked += 1
                age = self._limits.max_staleness  # what is older is left out of the loss
            elif age > self._limits.max_staleness:
                self.num_violations += 1
            self.ages[age] += 1
        self._tickets.trained(group.issue, step, age)
        self._rows.remove(group)
        self.removed(group)

    def give_back(self, held: Held, how: str) -> None:
        """The lease ends, and its rows are as if they had not been claimed."""
        task = self.tasks[held.task]
        self._leases.end(held, how)
        if not held.delivered:
            task.forget_plan(held)
        for group in held.groups:
            group.returned = True
            del task.held[group.issue]
            self._give_back(task, group, held.step)
        self._notify(task)

    def _give_back(self, task: Task, group: Group, step: int | None) -> None:
        if task.places is not None and step is None:
            task.places.add(group.due)
        elif task.places is not None and step is not None:
            task.places.give_back(step, group.due)
        if task.order is not None:
            task.order.push(group.issue)
        task.update(group)

    def expire(self) -> None:
        """Takes back the leases that are past their deadline."""
        for held in self._leases.expired():
            self.give_back(held, f"ran past its {self._leases.lease_s:g} s and its rows went back to the queue")

    # -- memory -------------------------------------------------------------------------------------------------------
    def is_needed(self, ticket: Ticket) -> bool:
        """Whether the next step cannot be completed from what is in the queue, and this ticket's group would help."""
        return not self._rows.groups or any(self._helps(task, ticket) for task in self.tasks.values())

    def _helps(self, task: Task, ticket: Ticket) -> bool:
        places = task.places
        if places is None:
            return False
        free, groups = places.free(places.next_step), self.open_groups(task)
        if task.order is not None:
            issues = [*(group.issue for group in groups), *self._tickets.in_flight, *self._tickets.again]
            return sum(issue < ticket.issue for issue in issues) < free
        if leaves_behind(self._limits):
            return sum(group.due >= places.next_step for group in groups) < free
        present = Counter(group.due for group in groups)
        before = places.takeable(present)
        return before < free and places.takeable(present + Counter([self._due(ticket)])) > before

    # -- inside -------------------------------------------------------------------------------------------------------
    def open_groups(self, task: Task) -> list[Group]:
        """Groups with rows that the task has not had; a scan, for rare events only."""
        return [group for group in self._rows.groups.values() if task.is_open(group)]

    def _due(self, ticket: Ticket) -> int:
        return due_step(self._limits, ticket.version)

    def _all_places(self) -> list[Places]:
        return [task.places for task in self.tasks.values() if task.places is not None]

    def _notify(self, task: Task) -> None:
        self._waits.notify(("claim", task.name))

    def _notify_all(self) -> None:
        for task in self.tasks.values():
            self._notify(task)
