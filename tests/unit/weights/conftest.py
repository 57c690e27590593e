import pytest
import torch

from relax.bus.core import Core
from relax.bus.transfer_queue import QueueLimits
from relax.weights import shared_memory

torch.set_num_threads(1)


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """Two empty folders in place of shared memory and the temporary directory."""
    shm, temporary = tmp_path / "shm", tmp_path / "tmp"
    shm.mkdir()
    temporary.mkdir()
    found = (("shm", shm), ("file", temporary))
    monkeypatch.setattr(shared_memory, "default_roots", lambda: found)
    return found


@pytest.fixture
async def bus():
    core = Core(QueueLimits(prompts_per_step=2, max_staleness=1, num_steps=10))
    yield core
    await core.close()
