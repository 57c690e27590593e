"""Groups in order: an issue that was given twice waits once."""

import pytest

from relax.bus.core import Core
from relax.bus.order import IssueOrder
from relax.bus.transfer_queue import QueueLimits
from relax.errors import WaitTimeout


def test_an_issue_waits_once_however_often_it_comes() -> None:
    order = IssueOrder([3, 1, 3])
    for issue in (1, 2, 2):
        order.push(issue)
    found = []
    while (issue := order.head(lambda issue: issue != 2)) is not None:
        found.append(issue)
        order.pop()
    assert found == [1, 3]
    order.push(1)
    assert order.head(lambda issue: True) == 1


@pytest.mark.parametrize("at_least", [1, 2])
async def test_a_ticket_that_was_given_again_does_not_block_its_step(at_least: int, group, ready) -> None:
    queue = Core(QueueLimits(prompts_per_step=2, max_staleness=0, num_steps=1, in_order=True))
    await ready(queue)
    with pytest.raises(WaitTimeout):
        await queue.claim("actor", ["tokens"], num_groups=2, wait_s=0, step=0)  # the actor asks before anything is there
    tickets = await queue.admit(2, 1)
    queue.give_again([tickets[0].issue])
    assert (await queue.admit(2, 1))[0].issue == tickets[0].issue
    for ticket in tickets:
        await queue.put_group(ticket.issue, group(), 1)
    lease = await queue.claim("actor", ["tokens"], num_groups=2, at_least=at_least, wait_s=1, step=0)
    assert dict.fromkeys(lease.group_ids) == dict.fromkeys(ticket.issue for ticket in tickets)
