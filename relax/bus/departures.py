"""Groups that leave the queue untrained: dropped on request, left behind by a step, lost when the trainer goes back."""

from collections.abc import Mapping

import numpy as np

from relax.bus.claim import Task
from relax.bus.claims import Claims
from relax.bus.groups import Group
from relax.bus.rows import Rows
from relax.bus.staleness import age_at, due_step, leaves_behind
from relax.bus.tickets import Tickets
from relax.bus.transfer_queue import QueueLimits
from relax.errors import BusError
from relax.types import Column


class Departures:
    """Says when a group is too late, and takes out what no step will train. `first_step`: how far the queue can go back."""

    def __init__(self, limits: QueueLimits, tickets: Tickets, rows: Rows, claims: Claims) -> None:
        self._limits, self._tickets, self._rows, self._claims = limits, tickets, rows, claims
        self.first_step = 0
        self.num_dropped = self.num_surplus = self.num_rewinds = 0

    # -- age ----------------------------------------------------------------------------------------------------------
    def deciding_version(self, columns: Mapping[str, Column]) -> int:
        """The version that says when the group is due: of its oldest trained token, or of the newest where older are masked."""
        is_newest = self._limits.on_stale == "mask"
        versions = columns["newest_versions" if is_newest else "versions"]
        assert isinstance(versions, np.ndarray), "the schema lets nothing else through"
        return int(versions.max() if is_newest else versions.min())

    def due(self, columns: Mapping[str, Column]) -> int:
        """The last step that may consume a group of these columns."""
        return due_step(self._limits, self.deciding_version(columns))

    @property
    def next_step(self) -> int:
        """The first step that is not trained."""
        steps = [task.places.next_step for task in self._final_tasks() if task.places is not None]
        return min(steps, default=self.first_step)

    def is_left_behind(self, due: int) -> bool:
        """Whether a group due by step `due` comes too late for every step."""
        return due < self.next_step and leaves_behind(self._limits)

    # -- leaving ------------------------------------------------------------------------------------------------------
    def drop(self, group: Group, reason: str, *, reissue: bool) -> None:
        self._tickets.dropped(group.issue, reason, reissue=reissue)
        self._rows.remove(group)
        self._claims.removed(group)

    def drop_late(self, group: Group) -> None:
        """The group is too old for every step to come."""
        step, bound = self.next_step, self._limits.max_staleness
        version = self.deciding_version(group.columns)
        age = (
            f"version {version} would be {age_at(self._limits, version, step)} updates old at step {step}, the bound is {bound}"
        )
        if self._limits.num_extra:
            self.num_surplus += 1
            self.drop(group, f"surplus: {age}", reissue=True)
        else:
            self.num_dropped += 1
            self.drop(group, f"too old: {age}", reissue=True)

    def after_step(self) -> None:
        """A step is trained: drops what it leaves behind. After the last one everything is surplus."""
        final = self._final_tasks()
        if leaves_behind(self._limits):
            late = [group for group in self._rows.groups.values() if self.is_left_behind(group.due)]
            for group in late:
                if all(task.is_open(group) for task in final):
                    self.drop_late(group)
        if self._tickets.is_finished:
            self._clear("surplus: the run is complete")

    def _clear(self, reason: str) -> None:
        groups = list(self._rows.groups.values())
        tickets = list(self._tickets.in_flight.values())
        self.num_surplus += len(groups) + len(tickets) + len(self._tickets.again)
        for group in groups:
            self.drop(group, reason, reissue=True)
        self._tickets.drop_tickets(reason)
        for ticket in tickets:
            self._rows.reserved.pop(ticket.issue, None)
            self._claims.withdrawn(ticket)

    def rewind(self, step: int) -> None:
        """Drops everything that is not trained, and what was trained at `step` or later."""
        if len(self._limits.final_tasks) > 1:
            raise BusError(f"the queue cannot go back: it has more than one final task: {', '.join(self._limits.final_tasks)}")
        if not self.first_step <= step <= self.next_step:
            raise BusError(f"the queue cannot go back to step {step}: it knows steps {self.first_step} to {self.next_step}")
        reason = f"lost with the trainer: it goes back to step {step}"
        for group in list(self._rows.groups.values()):
            self._tickets.dropped(group.issue, reason, reissue=True)
            self._rows.remove(group)
        self._rows.reserved.clear()
        self._tickets.drop_tickets(reason)
        for trained in self._tickets.untrain(step, reason):
            self._claims.ages.subtract([trained.age])
        self._claims.ages = +self._claims.ages
        self._claims.rewound(step, f"is {reason}")
        self.num_rewinds += 1

    def _final_tasks(self) -> list[Task]:
        return [task for name, task in self._claims.tasks.items() if name in self._limits.final_tasks]
