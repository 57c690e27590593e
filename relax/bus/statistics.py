"""What `stats()` shows: JSON values, computed when asked."""

from typing import Any

from relax.bus.claims import Claims
from relax.bus.leases import LeaseTable
from relax.bus.rows import Rows
from relax.bus.tickets import Tickets
from relax.bus.transfer_queue import QueueLimits
from relax.bus.versions import Versions
from relax.bus.waits import Waits


def statistics(
    limits: QueueLimits, tickets: Tickets, rows: Rows, claims: Claims, leases: LeaseTable, versions: Versions, waits: Waits
) -> dict[str, Any]:
    """Depth by state and by task, bytes, ages, tickets, versions by subscriber, waits with reasons, ledger counts.

    States of a group: `generating` (a ticket is out), `queued` (has rows, no final task has claimed it), `training`.
    """
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
        "bytes": {"held": rows.num_bytes, "reserved": sum(rows.reserved.values()), "most": rows.max_bytes},
        "tasks": {
            name: {
                "ready": {" ".join(sorted(columns)): len(index) for columns, index in task.indexes.items()},
                "leased": len(task.held),
                "next_step": task.places.next_step if task.places else None,
                "claimed_of_step": task.places.taken(task.places.next_step) if task.places else None,
            }
            for name, task in claims.tasks.items()
        },
        "leases": len(leases),
        "age": {
            "histogram": {str(age): count for age, count in sorted(claims.ages.items())},
            "max": max(claims.ages, default=None),
            "bound": limits.max_staleness,
            "violations": claims.num_violations,
        },
        "tickets": {"in_flight": sorted(tickets.in_flight), "next_issue": tickets.next_issue},
        "is_finished": tickets.is_finished,
        "versions": versions.stats(),
        "waits": waits.report(),
        "waited_s": waits.totals(),
        "ignored": {"rewrites": rows.num_rewrites_ignored, "late_rows": rows.num_late_rows},
        "ledger": tickets.counts(),
    }
