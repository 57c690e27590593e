"""A clock that the test moves, groups of rows, and both ways to reach a queue."""

from collections.abc import AsyncIterator

import numpy as np
import pytest

from relax.bus.address import new_address
from relax.bus.client import connect
from relax.bus.core import Core
from relax.bus.server import BusServer
from relax.bus.transfer_queue import QueueLimits, TransferQueue
from relax.types import Ragged


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds


@pytest.fixture
def group():
    return make_group


@pytest.fixture
def ready():
    return make_ready


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make_group(version: int = 0, num_rows: int = 2, length: int = 3, **more):
    """Columns of one group; row `r` has `length + r` tokens."""
    tokens = Ragged.pack([np.arange(length + row, dtype=np.int32) for row in range(num_rows)])
    return {"tokens": tokens, "versions": np.full(num_rows, version, np.int64), **more}


async def make_ready(queue: TransferQueue, version: int | None = 0) -> TransferQueue:
    """A queue whose only receiver of weights holds `version`."""
    await queue.subscribe("engine")
    if version is not None:
        await queue.acknowledge("engine", version)
    return queue


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
