"""Random lives of a queue, in all combinations of its limits."""

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from unit.bus.machine import QueueMachine

from relax.bus.transfer_queue import QueueLimits

EXAMPLES = int(os.environ.get("RELAX_EXAMPLES", "25"))
QueueMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
test_lives_that_look_for_faults = QueueMachine.TestCase

KINDS = {"in any order": (0, False), "in order": (0, True), "with groups to spare": (2, True)}


@pytest.mark.parametrize("on_stale", ["wait", "drop", "mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_long_lives(on_stale, kind):
    """Most goes well in them, so that they get far, with stragglers and now and then a death: each way to be late occurs."""
    extra, in_order = KINDS[kind]
    seen: Counter[str] = Counter()
    for seed, (bound, updates) in enumerate([(0, 1), (1, 1), (3, 1), (1, 2), (3, 2)] * 2):
        rng = Random(seed)
        machine = QueueMachine()
        machine.begin(QueueLimits(3, bound, 8, 1 << 30, 10.0, ("actor",), updates, on_stale, extra, in_order))
        while machine.step < 7:
            live(machine, rng)
            machine.holds()
            machine.shared_arrays_stay_as_long_as_a_row()
        machine.teardown()
        seen.update(machine.counters())
    assert (seen["dropped"] > 0) is (on_stale != "wait" and not in_order)
    assert (seen["masked"] > 0) is (on_stale == "mask" and not in_order)
    assert (seen["surplus"] > 0) is (extra > 0)
    assert seen["reissued"] > 0
    assert seen["rewinds"] > 0


def live(machine: QueueMachine, rng: Random) -> None:
    """One thing happens."""
    pick, chance = rng.randrange(1000), rng.random()
    if chance < 0.5:
        machine.everything_goes_well(1, rng.randrange(4))
    elif chance < 0.9:
        if machine.tickets:
            machine.put_group(pick, newer=rng.randrange(2), spread=rng.randrange(3), num_rows=rng.randint(1, 3))
        machine.claim_as_critic(2)
        machine.claim_as_actor(rng.randint(1, 4), at_least=rng.randint(1, 2), ahead=rng.randrange(2))
    elif chance < 0.92 and machine.tickets:
        machine.forfeit(pick, "filtered")
    elif chance < 0.94 and machine.tickets:
        machine.producer_dies(pick)
    elif chance < 0.96 and machine.leases:
        machine.all_but_those_that_renew_are_late(pick)
    elif chance < 0.98:
        machine.trainer_goes_back(pick if rng.random() < 0.5 else machine.step, is_so=True)
    else:
        machine.queue_dies(is_so=True)
