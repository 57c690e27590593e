"""A run in which nothing moves says who works, who waits for what, who has no weights, and which groups are held up."""

import asyncio

import pytest

from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits
from relax.bus.waits import caller
from relax.control.stall import ProgressWatch, explain_stall


def test_the_one_who_does_not_wait_is_named_with_what_it_holds():
    statuses = {
        "rollout": {"activity": "generating", "running": True},
        "advantages": {"activity": "computing 8 rows", "running": True, "leases": ["a1", "a2"]},
        "actor": {"activity": "step 3: waiting for 4 groups", "running": True},
    }
    waits = [
        {"who": "actor", "call": "claim", "reason": "rows of groups 12, 13 to have advantages", "since_s": 600.0},
        {"who": "rollout", "call": "admit", "reason": "a place in batch 4", "since_s": 599.0},
    ]
    stats = {"waits": waits, "tickets": {"in_flight": list(range(20, 32))}, "depth": {"groups": {"to_generate_again": 2}}}
    text = explain_stall(statuses, stats, 601.2, 600.0)
    assert "601 s (services.progress_timeout_s = 600)" in text
    assert "advantages: computing 8 rows, holds 2 leases (a1, a2)" in text
    assert "actor waits for rows of groups 12, 13 to have advantages (600.0 s)" in text
    assert "actor: " not in text, "who waits is not to blame"
    assert "groups that are being generated: 20, 21, 22, 23, 24, 25, 26, 27 and 4 more" in text
    assert "2 groups are to be generated again" in text


def test_progress_of_any_role_counts():
    watch = ProgressWatch(0.0)
    watch.look({"actor": {"progress": 3}}, 1.0)
    watch.look({"actor": {"progress": 3}, "rollout": {}}, 5.0)
    assert watch.stalled_s(5.0) == 4.0
    watch.look({"actor": {"progress": 4}}, 6.0)
    assert watch.stalled_s(6.0) == 0.0
    watch.moved(8.0)
    assert watch.stalled_s(9.0) == 1.0


async def test_an_engine_that_is_never_given_weights_is_named():
    core = Core(QueueLimits(prompts_per_step=2, max_staleness=1, num_steps=4))

    async def follows(name):
        caller.set(name)
        await core.subscribe(name)
        await core.next_manifest(name, 60.0)

    waiting = asyncio.create_task(follows("engine-0"))
    await core.subscribe("engine-1")
    await core.reject("engine-1", 0, "another digest")
    await asyncio.sleep(0)
    text = explain_stall({}, await core.stats(), 700.0, 600.0)
    assert "engine-0 has no weights: waits for a first policy version to be announced" in text
    assert "engine-1 has no weights: rejected version 0: another digest" in text
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await core.close()
