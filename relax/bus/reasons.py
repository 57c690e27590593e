"""What a claim waits for, in words. It scans, and is asked only when somebody wants to know."""

from relax.bus.claim import Claim
from relax.bus.claims import Claims
from relax.bus.groups import issues_text
from relax.bus.tickets import Tickets


def waiting_for(claim: Claim, claims: Claims, tickets: Tickets) -> str:
    """Why `claim` cannot be given anything: missing columns, groups in generation, leases of others, admission."""
    task = claims.tasks[claim.task]
    of_step = "" if claim.step is None else f" of step {claim.step}"
    index = claims.index(task, claim.columns)
    unfinished: dict[str, list[int]] = {}
    for group in claims.open_groups(task):
        if group.issue not in index.ready:
            unfinished.setdefault(", ".join(sorted(claim.columns - group.columns.keys())), []).append(group.issue)
    num_unfinished = sum(len(issues) for issues in unfinished.values())
    generating = [ticket.issue for ticket in sorted(tickets.in_flight.values(), key=lambda t: (t.version, t.issue))]
    wanted = len(generating)
    if claim.step is not None and task.places is not None:
        wanted = task.places.free(claim.step) - len(index.ready) - num_unfinished

    reasons = []
    if index.ready and claim.num_ranks > 1:
        reasons.append(f"{_groups(len(index.ready))} ready, not enough yet for {claim.num_ranks} ranks")
    elif 0 < len(index.ready) < claim.at_least:
        reasons.append(f"{_groups(len(index.ready))} ready of the {claim.at_least} that are wanted at least")
    elif index.ready and claim.step is not None and task.order is not None:
        reasons.append(f"{_groups(len(index.ready))} ready, but groups are given in order, and an earlier one is not")
    elif index.ready:
        reasons.append(f"{_groups(len(index.ready))} ready but held back, so that older ones still find a place in time")
    for absent, issues in unfinished.items():
        verb = "waits" if len(issues) == 1 else "wait"
        reasons.append(f"{_groups(len(issues))}{of_step} {verb} for column {absent}: {issues_text(sorted(issues))}")
    if generating:
        some = sorted(generating[: max(1, wanted)])
        reasons.append(
            f"{_groups(len(some))}{of_step} {'is' if len(some) == 1 else 'are'} still being generated: {issues_text(some)}"
        )
    if tickets.again:
        reasons.append(f"{issues_text(sorted(tickets.again))} must be generated again")
    if task.held:
        consumers = sorted({held.consumer or "another consumer" for held in task.held.values()})
        reasons.append(f"{_groups(len(task.held))} leased to {', '.join(consumers)}")
    if not reasons or (claim.step is not None and len(generating) < wanted):
        reasons.append(f"groups{of_step} are not admitted, waiting for {tickets.waiting_for()}")
    return "; ".join(reasons)


def _groups(count: int) -> str:
    return f"{count} group{'s' if count != 1 else ''}"
