"""The shared parts as fixtures, and both ways to reach a queue."""

from collections.abc import AsyncIterator

import pytest
from unit.bus.parts import FakeClock, make_group, make_manifest, make_ready

from relax.bus.address import new_address
from relax.bus.client import connect
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits, TransferQueue


@pytest.fixture
def group():
    return make_group


@pytest.fixture
def ready():
    return make_ready


@pytest.fixture
def manifest():
    return make_manifest


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


LIMITS = QueueLimits(prompts_per_step=4, max_staleness=1, num_steps=3)


@pytest.fixture(params=["in process", "socket"])
async def queue(request) -> AsyncIterator[TransferQueue]:
    """The same face twice: what is true of one is true of the other."""
    core = Core(LIMITS)
    if request.param == "in process":
        yield core
        await core.close()
        return
    async with BusServer(core, new_address()) as server:
        client = await connect(server.address, name="test")
        yield client
        await client.close()
