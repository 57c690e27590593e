"""What `stats()` shows: JSON values, computed when asked."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax.bus.core import Core


def statistics(core: "Core") -> dict[str, Any]:
    """Depth by state and by task, bytes, ages, tickets, versions by subscriber, waits with reasons, ledger counts.

    States of a group: `generating` (a ticket is out), `queued` (has rows, no final task has claimed it), `training`.
    """
    limits, tickets, rows, claims, departures = core.limits, core.tickets, core.rows, core.claims, core.departures
    final = [task for name, task in claims.tasks.items() if name in limits.final_tasks]
    training = {issue for task in final for issue in task.held}
    num_rows = {issue: len(group.row_ids) for issue, group in rows.groups.items()}
    rows_training = sum(num_rows[issue] for issue in training)
    return {
        "depth": {
            "groups": {
                "generating": len(tickets.in_flight),
                "queued": len(rows.groups) - len(training),
                "training": len(training),
                "to_generate_again": len(tickets.again),
            },
            "rows": {"queued": sum(num_rows.values()) - rows_training, "training": rows_training},
        },
        "bytes": {
            "held": rows.num_bytes,
            "shared": sum(group.num_shared_bytes for group in rows.groups.values()),
            "reserved": sum(rows.reserved.values()),
            "most": rows.max_bytes,
        },
        "tasks": {
            name: {
                "ready": {" ".join(sorted(columns)): len(index) for columns, index in task.indexes.items()},
                "leased": len(task.held),
                "next_step": task.places.next_step if task.places else None,
                "claimed_of_step": task.places.taken(task.places.next_step) if task.places else None,
            }
            for name, task in claims.tasks.items()
        },
        "leases": len(core.leases),
        "age": {
            "histogram": {str(age): count for age, count in sorted(claims.ages.items())},
            "max": max(claims.ages, default=None),
            "bound": limits.max_staleness,
            "violations": claims.num_violations,
        },
        "stale": {"dropped": departures.num_dropped, "masked": claims.num_masked, "surplus": departures.num_surplus},
        "reissued": tickets.numbers.num_reissued,
        "rewinds": departures.num_rewinds,
        "tickets": {
            "in_flight": sorted(tickets.in_flight),
            "next_issue": tickets.next_issue,
            "next_prompt": tickets.numbers.next_prompt,
            "prompts_to_reissue": len(tickets.numbers.waiting),
        },
        "is_finished": tickets.is_finished,
        "versions": core.versions.stats(),
        "turn": core.versions.turns.stats(),
        "waits": core.waits.report(),
        "waited_s": core.waits.totals(),
        "ignored": {"rewrites": rows.num_rewrites_ignored, "late_rows": rows.num_late_rows},
        "ledger": tickets.counts(),
    }
