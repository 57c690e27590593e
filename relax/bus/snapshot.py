"""A core from a snapshot: un-acknowledged rows are un-consumed, tickets that were out are given again."""

import heapq
from pathlib import Path

from relax.bus import state as saved
from relax.bus.core import Core
from relax.bus.ledger import Fate, Ledger
from relax.bus.transfer_queue import QueueLimits
from relax.clock import Clock
from relax.errors import CheckpointError


def restore(path: str | Path, limits: QueueLimits, *, clock: Clock | None = None, ledger: Ledger | None = None) -> Core:
    """A new core, of a new incarnation, with the state in `path`; `ledger` goes back to that state as well.

    `limits` may differ in all but `prompts_per_step`. Groups that a smaller `max_staleness` cannot consume any more are
    generated again under their issue numbers. Raises `CheckpointError` for a file that is missing or damaged.
    """
    state, columns = saved.read(path)
    if state.prompts_per_step != limits.prompts_per_step:
        raise CheckpointError(
            f"{path}: made with rollout.prompts_per_step = {state.prompts_per_step}, which cannot become "
            f"{limits.prompts_per_step}: the steps that are trained would not be whole"
        )
    core = Core(limits, clock=clock)
    core.tickets.next_issue = state.next_issue
    core.tickets.fates.update({Fate(name): count for name, count in state.fates.items()})
    core.tickets.again = list(state.in_flight)
    core.claims.ages.update(state.ages)
    next_step = min(state.steps.values(), default=0)
    room = [limits.prompts_per_step] * (min(limits.max_staleness, len(state.groups)) + 1)
    for group, group_columns in sorted(
        zip(state.groups, columns, strict=True), key=lambda pair: (pair[0].version, pair[0].issue)
    ):
        if not _fits(group.version - next_step + limits.max_staleness, room):
            core.tickets.again.append(group.issue)
            continue
        checked, num_rows, size = core.rows.schema.check_group(group.issue, group_columns)
        added = core.rows.add(group.issue, checked, group.version, num_rows, size)
        added.done.update(group.done)
        added.returned = True  # a column may be there from a consumer that had not acknowledged yet
        core.tickets.num_queued += 1
    heapq.heapify(core.tickets.again)
    for task, step in state.steps.items():
        core.claims.resume(task, step)
    if ledger is not None:
        ledger.rewind(state.next_issue, [*core.rows.groups, *core.tickets.again])
        core.tickets.attach(ledger)
    return core


def _fits(steps_left: int, room: list[int]) -> bool:
    """Takes a place in one of the steps up to `steps_left` steps from now, the last one that is free."""
    for step in range(min(steps_left, len(room) - 1), -1, -1):
        if room[step]:
            room[step] -= 1
            return True
    return False
