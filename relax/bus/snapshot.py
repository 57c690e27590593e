"""A core from a snapshot: un-acknowledged rows are un-consumed, tickets that were out are given again."""

from pathlib import Path
from typing import NamedTuple

from relax.bus import state as saved
from relax.bus.core import Core
from relax.bus.ledger import Fate, Ledger
from relax.bus.schema import Content
from relax.bus.staleness import leaves_behind
from relax.bus.state import Arrays, Columns, SavedGroup, SavedState
from relax.bus.transfer_queue import QueueLimits
from relax.clock import Clock
from relax.errors import ConfigError


class _Found(NamedTuple):
    """A group of the snapshot, checked. `due`: by the limits of now."""

    saved: SavedGroup
    content: Content
    due: int


def restore(path: str | Path, limits: QueueLimits, *, clock: Clock | None = None, ledger: Ledger | None = None) -> Core:
    """A new core, of a new incarnation, with the state in `path`; `ledger` goes back to that state as well.

    `limits` may differ in all but `prompts_per_step`. Groups that a smaller `max_staleness` cannot consume any more are
    generated again under their issue numbers. Raises `ConfigError` for another `prompts_per_step`, `CheckpointError` for a file
    that is missing, damaged or of another format, and `BusError` for a ledger that is another run's.
    """
    state, contents = saved.read(path)
    if state.prompts_per_step != limits.prompts_per_step:
        raise ConfigError(
            f"{path}: made with rollout.prompts_per_step = {state.prompts_per_step}, which cannot become "
            f"{limits.prompts_per_step}: the steps that are trained would not be whole"
        )
    core = Core(limits, clock=clock)
    _restore_counts(core, state)
    found = [_check(core, group, *given) for group, given in zip(state.groups, contents, strict=True)]
    for group in _fitting(core, found):
        issue, version = group.saved.issue, group.saved.version
        added = core.rows.add(issue, group.content, version, group.due)
        added.done.update(group.saved.done)
        added.returned = True  # a column may be there from a consumer that had not acknowledged yet
        core.tickets.num_queued += 1
    core.tickets.again = sorted(core.tickets.prompts.keys() - core.rows.groups.keys())  # sorted: a heap
    for task, step in state.steps.items():
        core.claims.resume(task, step)
    core.tickets.check(core.rows.groups)
    if ledger is not None:
        ledger.restore(state.next_issue, core.tickets.prompts)
        ledger.check(core.tickets.counts())
        core.tickets.attach(ledger)
    return core


def _restore_counts(core: Core, state: SavedState) -> None:
    tickets, counters = core.tickets, state.counters
    tickets.next_issue = state.next_issue
    tickets.prompts.update(state.in_flight)
    tickets.prompts.update({group.issue: group.prompt for group in state.groups})
    tickets.numbers.restore(state.next_prompt, state.to_reissue, counters["reissued"])
    tickets.fates.update({Fate(name): count for name, count in state.fates.items()})
    core.claims.ages.update(state.ages)
    core.claims.num_masked = counters["masked"]
    core.departures.first_step = min(state.steps.values(), default=0)
    core.departures.num_dropped, core.departures.num_surplus = counters["dropped"], counters["surplus"]
    core.departures.num_rewinds = counters["rewinds"]


def _check(core: Core, group: SavedGroup, columns: Columns, shared: Arrays) -> _Found:
    content = core.rows.schema.check_group(group.issue, columns, shared)
    return _Found(group, content, core.departures.due(content.columns))


def _fitting(core: Core, groups: list[_Found]) -> list[_Found]:
    """The groups that the steps to come can consume, under limits that may be others than before."""
    limits, next_step = core.limits, core.departures.first_step
    num_prompts = limits.prompts_per_step
    if limits.in_order:
        # each falls in the step of its place among all issues that are not settled; others are in the way of admission
        position = {issue: index for index, issue in enumerate(sorted(core.tickets.prompts))}
        steps = {issue: next_step + max(0, place - limits.num_extra) // num_prompts for issue, place in position.items()}
        return [group for group in groups if group.due >= max(next_step, steps[group.saved.issue])]
    if leaves_behind(limits):
        return [group for group in groups if group.due >= next_step]
    room = [num_prompts] * (len(groups) // num_prompts + limits.max_staleness + 1)
    oldest_first = sorted(groups, key=lambda group: (group.due, group.saved.issue))
    return [group for group in oldest_first if _takes_place(group.due - next_step, room)]


def _takes_place(steps_left: int, room: list[int]) -> bool:
    """Takes a place in one of the steps up to `steps_left` steps from now, the last one that is free."""
    for step in range(min(steps_left, len(room) - 1), -1, -1):
        if room[step]:
            room[step] -= 1
            return True
    return False
