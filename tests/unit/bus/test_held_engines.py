"""Turns on shared devices: an engine that comes while the engines are held may load, and gives up before the trainer begins."""

import pytest

from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits
from relax.errors import WaitTimeout


async def test_whoever_holds_the_engines_gets_a_new_one_when_the_last_one_dies(manifest) -> None:
    queue = Core(QueueLimits(prompts_per_step=2, max_staleness=0, num_steps=2))
    await queue.announce(manifest(0))
    await queue.subscribe("engine", takes_turns=True)
    await queue.acknowledge("engine", 0)
    await queue.hold_engines("evaluation", 1)
    with pytest.raises(WaitTimeout, match="evaluation to let the engines go"):
        await queue.recall(0)

    queue.drop_subscriber("engine")
    await queue.subscribe("another", takes_turns=True)
    assert await queue.next_manifest("another", 1) == manifest(0), "the evaluation needs an engine to come to its end"
    await queue.acknowledge("another", 0)
    await queue.let_go("evaluation")
    with pytest.raises(WaitTimeout, match="another to give the weights up"):
        await queue.recall(0)
    assert await queue.next_manifest("another", 1) is None
    await queue.gave_up("another")
    await queue.recall(0)


async def test_an_engine_that_loads_when_the_holder_lets_go_is_waited_for(manifest) -> None:
    queue = Core(QueueLimits(prompts_per_step=2, max_staleness=0, num_steps=2))
    await queue.announce(manifest(0))
    await queue.hold_engines("evaluation", 1)
    with pytest.raises(WaitTimeout):
        await queue.recall(0)
    await queue.subscribe("engine", takes_turns=True)
    await queue.next_manifest("engine", 1)
    await queue.let_go("evaluation")
    with pytest.raises(WaitTimeout, match="engine to give the weights up"):
        await queue.recall(0)


async def test_an_engine_that_comes_in_the_trainers_turn_waits_for_the_next_version(manifest) -> None:
    queue = Core(QueueLimits(prompts_per_step=2, max_staleness=0, num_steps=2))
    await queue.announce(manifest(0))
    await queue.recall(0)
    await queue.subscribe("engine", takes_turns=True)
    with pytest.raises(WaitTimeout, match="whose turn it is"):
        await queue.next_manifest("engine", 0)
    await queue.announce(manifest(1))
    assert await queue.next_manifest("engine", 1) == manifest(1)
